"""The table at the end of a sweep, and the files that a sweep writes."""

import errno
import io
import json
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from components.contracts.errors import CompletedError, ConfigError
from components.contracts.json_types import Json
from components.contracts.status import RunStatus
from runner.config.command_line import is_sweep, single_job_overrides
from runner.launch.checks import is_own_run
from runner.launch.prepare import is_recorded
from runner.records.job_record import JobRecord, SweepJob, are_comparable, read_job_record
from runner.records.run_dir import write_config
from runner.records.run_record import RunRecord, SweepPlace
from runner.records.run_summary import Results
from runner.sweeps.sweep import create_sweep, finish_sweep, loss_of
from runner.sweeps.table import format_value, print_table

LAYOUTS = ("single", "fsdp2_tp2cp2", "tp2pp2dp2")


def outcome(number: int) -> JobRecord:
    """Return the record of a job; every seventh job is refused, and job 150 is the best."""
    own = (f"optimizer.lr={1e-4 * (number + 1) / 3}", f"parallelism={LAYOUTS[number % 3]}")
    done = JobRecord(
        number, ("stage=sft", *own), "completed", loss=5 + abs(number - 150) / 1000, seconds=61.4
    )
    folder = f"/data/outputs/sft_tiny/2026-11-22_08-14-{number:03d}"
    refused = replace(done, status="invalid", loss=None, error="run.seed: is wrong; use 1.")
    return refused if number % 7 == 0 else replace(done, folder=folder)


def full(disk: Path) -> Callable[[Path, str], None]:
    """Return a function that writes a file, but fails for the path ``disk`` as on a full disk."""

    def write(path: Path, text: str) -> None:
        if path == disk:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_text(text)

    return write


def shown(records: list[JobRecord], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(records, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_two_hundred_jobs_in_eighty_columns() -> None:
    lines = shown([outcome(number) for number in range(200)], 80)
    rows = [line.split() for line in lines if re.match(r" *\d+  ", line)]
    assert [int(row[0]) for row in rows] == list(range(200))
    assert rows[1] == ["1", "6.667e-05", "fsdp2_tp2cp2", "completed", "5.1490", "61"]
    assert [row[0] for row in rows if "*" in row] == ["150"]
    assert lines[0].split() == ["job", "lr", "parallelism", "result", "loss", "seconds"]
    assert sum("invalid: run.seed: is wrong; use 1." in line for line in lines) == 29
    assert max(map(len, lines)) <= 80


def test_a_wide_terminal_shows_folders() -> None:
    lines = shown([outcome(number) for number in range(3)], 120)
    assert lines[0].split()[-2:] == ["run", "folder"]
    assert lines[3].split()[-1] == "sft_tiny/2026-11-22_08-14-001"


def test_keys_that_end_alike_keep_their_names() -> None:
    words = [("a.name=1", "b.name=1"), ("a.name=2", "b.name=2")]
    lines = shown([JobRecord(n, own, "interrupted") for n, own in enumerate(words)], 80)
    assert lines[0].split()[:3] == ["job", "a.name", "b.name"]


@pytest.mark.parametrize("swept", ["stage", "stage.loss", "+stage.beta"])
def test_losses_of_different_stages_have_no_best(
    swept: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_sweep(tmp_path, ["run.seed=1"])
    for number, value in enumerate(("a", "b")):
        words = (f"{swept}={value}", "run.seed=1")
        SweepJob(tmp_path, number, words).write(JobRecord(number, words, "completed", loss=5.0 - number))
    assert finish_sweep(tmp_path, 0) == 0
    out = capsys.readouterr().out
    assert "no best job: losses of different stages" in out
    assert "*" not in out
    assert json.loads((tmp_path / "sweep.json").read_text())["best"] is None
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.parametrize(("second", "comparable"), [("pt", False), ("sft", True)])
def test_an_experiment_may_choose_a_stage(second: str, comparable: bool, tmp_path: Path) -> None:
    records = []
    for number, stage in enumerate(("sft", second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(f"stage: {{_target_: {stage}, reference: r{number}}}")
        words = (f"experiment=e{number}",)
        records.append(JobRecord(number, words, "completed", str(folder), loss=5.0 - number))
    assert are_comparable(records) == comparable


@pytest.mark.parametrize("words", [("stage=dpo",), ("stage=dpo", "stage.reference=frozen")])
def test_a_sweep_of_one_stage_has_a_best_job(words: tuple[str, ...], tmp_path: Path) -> None:
    """With one readable record, too."""
    create_sweep(tmp_path, ["stage=dpo"])
    SweepJob(tmp_path, 0, words).write(JobRecord(0, words, "completed", loss=5.0))
    SweepJob(tmp_path, 1, ("stage=dpo",)).write(JobRecord(1, ("stage=dpo",), "completed", loss=4.0))
    (tmp_path / "jobs" / "2.json").write_text("{")
    finish_sweep(tmp_path, 0)
    assert json.loads((tmp_path / "sweep.json").read_text())["best"] == 1


def test_what_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_sweep(tmp_path, ["stage=sft", "run.seed=1,2"])
    began = json.loads((tmp_path / "sweep.json").read_text())
    for number in range(9):
        SweepJob(tmp_path, number, ()).write(outcome(number))
    assert finish_sweep(tmp_path, 0) == 2
    facts = json.loads((tmp_path / "sweep.json").read_text())
    assert facts | began == facts
    assert facts["overrides"] == ["stage=sft", "run.seed=1,2"]
    assert (facts["jobs"], facts["best"], facts["exit_code"]) == (9, 8, 2)
    assert facts["counts"] == {"invalid": 2, "completed": 7}
    assert "2 invalid, 7 completed\nbest: job 8, loss 5.1420" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.dir: .* has the jobs of an earlier sweep"):
        create_sweep(tmp_path, ["stage=sft", "run.seed=3"])
    create_sweep(tmp_path, ["stage=sft", "run.seed=1,2"], resumes=True)
    assert json.loads((tmp_path / "sweep.json").read_text())["began"] == began["began"]


def test_a_folder_without_jobs_takes_the_next_command(tmp_path: Path) -> None:
    for resumes in (False, True):
        for words in (["run.seed=1"], ["run.seed=2"]):
            create_sweep(tmp_path, words, resumes=resumes)
            assert json.loads((tmp_path / "sweep.json").read_text())["overrides"] == words


@pytest.mark.parametrize("name", ["sweep.json", "best.yaml"])
def test_a_full_disk_at_the_end_hides_no_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create_sweep(tmp_path, [])
    SweepJob(tmp_path, 0, ()).write(outcome(1))
    monkeypatch.setattr("runner.sweeps.sweep.write_atomic", full(tmp_path / name))
    assert finish_sweep(tmp_path, 0) == 1
    said = capsys.readouterr()
    assert "1 completed\nbest: job 1" in said.out
    assert said.err == f"error: {tmp_path / name}: cannot be written: No space left on device.\n"


@pytest.mark.parametrize(
    ("status", "code"), [("failed", 1), ("running", 1), ("invalid", 2), ("interrupted", 0), ("pruned", 0)]
)
def test_exit_codes(tmp_path: Path, status: str, code: int) -> None:
    create_sweep(tmp_path, [])
    SweepJob(tmp_path, 0, ()).write(outcome(1))
    SweepJob(tmp_path, 1, ()).write(replace(outcome(2), number=1, status=status))  # type: ignore[arg-type]
    assert finish_sweep(tmp_path, 0) == code
    assert finish_sweep(tmp_path, 130) == 130


@pytest.mark.parametrize(
    ("old", "new"),
    [("done", "completed"), ("refused", "invalid"), ("stopped", "interrupted"), ("pruned", "pruned")],
)
def test_records_of_older_sweeps_and_runs_are_read(tmp_path: Path, old: str, new: str) -> None:
    job = SweepJob(tmp_path, 0, ())
    job.write(replace(outcome(1), status=old))  # type: ignore[arg-type]
    assert read_job_record(job.path).status == new
    if new in get_args(RunStatus):
        assert RunRecord.from_json({"ended": old}).ended == new


def test_a_job_alone_is_no_sweep() -> None:
    assert is_sweep(["runner", "sweep=mine"])
    assert not is_sweep(["runner", "sweep=mine", "hydra.mode=RUN"])
    assert is_sweep(["runner", "-m", "hydra.mode=RUN"])
    assert single_job_overrides(("stage=sft",), ["runner", "-m", "stage=sft,pt"]) == ["stage=sft"]
    assert single_job_overrides(("experiment=mine",), ["runner", "-m"]) == [
        "experiment=mine",
        "hydra.mode=RUN",
    ]
    assert single_job_overrides(
        ("sweep=mine", "seed=1"), ["runner", "--config-dir", "conf", "sweep=mine"]
    ) == [
        "--config-dir=conf",
        "sweep=mine",
        "seed=1",
        "hydra.mode=RUN",
    ]
    assert single_job_overrides(("seed=1",), ["runner", "-m", "-cd=conf", "seed=1,2"]) == [
        "--config-dir=conf",
        "seed=1",
    ]


def test_a_job_continues_only_a_run_with_the_same_swept_values(tmp_path: Path) -> None:
    run, words = tmp_path / "2026-01-01_00-00-00", ("run.seed=0", "optimizer.lr=0.001")
    run.mkdir()
    job = SweepJob(tmp_path, 0, words, words)
    assert not is_own_run(run, job), "it has no record"
    RunRecord(sweep=SweepPlace("s", 3, [*reversed(words)]), overrides=["run.export=False", *words]).write(run)
    assert is_own_run(run, job)
    assert not is_own_run(run, SweepJob(tmp_path, 0, words[:1], words[:1])), "another sweep varies less"
    assert is_own_run(run, None)
    assert not is_own_run(tmp_path / "2026-01-01_00-00-00_copy", None)
    (run / "run.json").write_text('{"restarts": "often"}')
    assert not is_own_run(run, job)


@pytest.mark.parametrize(
    ("same", "launched", "taken"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_the_loss_of_a_job_that_has_completed_before(
    same: bool, launched: bool, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of srun cannot take it."""
    RunRecord(ended="completed", results=Results(last={"eval/loss": 2.0})).write(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if launched else ():
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")

    def task() -> float:
        error = CompletedError("run.max_steps: ...", tmp_path)
        error.same_config = same
        raise pickle.loads(pickle.dumps(error))

    with nullcontext() if taken else pytest.raises(CompletedError, match=r"^run\.max_steps: \.\.\.$"):
        assert loss_of(SweepJob(tmp_path, 0, ()), task) == 2.0


@pytest.mark.parametrize(
    ("key", "value", "same"), [("lr", 1e-3, True), ("lr", 2e-3, False), ("micro_batch_size", "auto", True)]
)
def test_a_run_with_another_config_is_not_the_same_job(
    key: str, value: object, same: bool, tmp_path: Path
) -> None:
    config: Json = {group: {"init_from": None} for group in ("model", "adapter", "checkpoint", "stage")}
    config["run"] = {"lr": 1e-3, "micro_batch_size": 4}
    write_config(tmp_path, config)
    now = config | {"run": config["run"] | {key: value}}
    assert is_recorded(now, tmp_path) == same


def test_only_fractions_are_shortened() -> None:
    for value, shown in {
        "0.00012345678901234567": "0.0001235",
        "1.2345678901234567e-05": "1.235e-05",
        "123456789": "123456789",
        "127.0.0.1.5": "127.0.0.1.5",
        "0.0001": "0.0001",
    }.items():
        assert format_value(value) == shown
