"""``-m`` runs jobs one after another in one process without effects on each other."""

import errno
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from components.contracts.errors import TrainingError
from runner.launch import run as launch
from runner.records.job_record import read_job_records
from runner.training.pruner import leave_pruner
from tests.e2e.commands import SMALL, call_here, curve, rows, run_forked, run_here


def test_four_jobs(tmp_path: Path) -> None:
    sweep = ["-m", *SMALL, "optimizer.lr=1e-3,3e-3", "stage=pt,sft"]
    answer = run_forked(*sweep, f"run.output_dir={tmp_path}", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    # Two jobs have the texts of pt, and two the chats of sft.
    assert answer.stderr.count("stop token trained") == 2
    assert answer.stderr.count("data        as in an earlier job of the sweep") == 2
    runs = sorted(tmp_path.glob("*_tiny/*/metrics.jsonl"))
    assert len(runs) == 4
    alone = run_here(tmp_path / "alone", *SMALL, "stage=sft", "optimizer.lr=3e-3")
    assert curve(alone) in [curve(path.parent) for path in runs]


def test_the_returned_value_is_the_final_eval_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[float] = []
    original = launch.run
    monkeypatch.setattr(
        "runner.launch.run.run", lambda *a, **k: returned.append(original(*a, **k)) or returned[-1]
    )
    run = run_here(tmp_path, *SMALL)
    assert returned == [rows(run, "eval/loss")[-1]["eval/loss"]]


def test_a_sweep_under_torchrun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for words in (("-m", "run.seed=1,2"), ("sweep=lr_layout",)):
        assert call_here(*words, f"run.output_dir={tmp_path}") == 2
        assert "torchrun" in capsys.readouterr().err
    monkeypatch.setattr("runner.launch.run.run", lambda *_: 1.0)
    assert call_here("sweep=lr_layout", "hydra.mode=RUN") == 0, "a single job of the sweep"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "LOCAL_RANK, WORLD_SIZE is not"),
        ({"TORCHELASTIC_RUN_ID": "1", "RUNNER_MAX_REQUEUES": "1"}, "add torchrun --signals-to-handle="),
    ],
    ids=["a rank of no number", "a torchrun that forwards no notice"],
)
def test_half_a_launcher_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    words: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert call_here(*SMALL, f"run.output_dir={tmp_path}") == 2
    assert words in capsys.readouterr().err


def test_a_refused_point_is_listed_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    GlobalHydra.instance().clear()
    assert call_here("-m", *SMALL, "run.global_batch_size=5,4", f"run.output_dir={tmp_path}") == 2
    shown = capsys.readouterr()
    assert "run.global_batch_size: 5 is not divisible" in shown.err
    refused, done = read_job_records(next((tmp_path / "sweeps").iterdir()))
    assert (refused.status, refused.folder, refused.loss) == ("invalid", None, None)
    assert (done.status, done.error) == ("completed", None)
    assert done.loss == rows(Path(str(done.folder)), "eval/loss")[-1]["eval/loss"]
    assert json.loads((Path(str(done.folder)) / "run.json").read_text())["sweep"]["number"] == 1


def test_a_sweep_of_refused_points_is_a_mistake(tmp_path: Path) -> None:
    GlobalHydra.instance().clear()
    assert call_here("-m", *SMALL, "run.global_batch_size=5,7", f"run.output_dir={tmp_path}") == 2


def test_a_sweep_that_has_no_folder_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    GlobalHydra.instance().clear()
    assert call_here("-m", *SMALL, "run.seed=1,2", f"run.output_dir={tmp_path / 'file'}") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: hydra.sweep.dir: cannot make {tmp_path / 'file'}")
    assert "another run.output_dir" in said


def test_a_failed_job_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = launch.run

    def fails_once(config: Any, *rest: Any) -> float:
        if config["run"]["seed"] == 1:
            raise TrainingError("the second of them")
        return original(config, *rest)

    monkeypatch.setattr("runner.launch.run.run", fails_once)
    GlobalHydra.instance().clear()
    assert call_here("-m", *SMALL, "run.seed=0,1,2", f"run.output_dir={tmp_path}") == 1
    assert "error: the second of them" in capsys.readouterr().err
    outcomes = read_job_records(next((tmp_path / "sweeps").iterdir()))
    assert [outcome.status for outcome in outcomes] == ["completed", "failed", "completed"]
    assert outcomes[1].error == "TrainingError: the second of them"


def test_a_record_that_cannot_be_written_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(path: Path, text: str) -> None:
        if path.name == "1.json" and '"completed"' in text:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_text(text)

    monkeypatch.setattr("runner.launch.run.run", lambda *_: 1.0)
    monkeypatch.setattr("runner.records.job_record.write_atomic", write)
    GlobalHydra.instance().clear()
    assert call_here("-m", "run.seed=0,1,2", f"run.output_dir={tmp_path}") == 1
    said = capsys.readouterr()
    assert "2 completed, 1 running" in said.out
    assert "jobs/1.json: cannot be written: No space left on device." in said.err
    assert "Traceback" not in said.err


@dataclass(frozen=True)
class Prunes:
    """A pruner that stops job 1 at step 2 and logs all its calls."""

    number: int
    told: str

    def __call__(self, step: int, loss: float) -> bool:
        with Path(self.told).open("a") as file:
            file.write(f"{self.number} {step} {loss}\n")
        return self.number == 1 and step == 2


@dataclass(frozen=True)
class LeavesPruner(Callback):
    """As Optuna's sweeper does once the folder is there."""

    told: str

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        leave_pruner(Path(config.hydra.sweep.dir), "tests.e2e.test_sweep:Prunes", {"told": self.told})


def test_ranks_end_together_where_a_sweep_has_seen_enough(tmp_path: Path) -> None:
    """Only the first rank calls the pruner, which is named in the sweep folder, and all ranks stop."""
    told, sweep = tmp_path / "told", tmp_path / "sweep"
    own = "+hydra.callbacks.own={_target_: tests.e2e.test_sweep.LeavesPruner, told: %s}"
    two_ranks = ("parallelism=fsdp2", "run.micro_batch_size=1", "run.eval_every=1", "run.export=false")
    arguments = (*SMALL, *two_ranks, "run.seed=0,1", f"run.output_dir={tmp_path}")
    GlobalHydra.instance().clear()
    assert call_here("-m", f"hydra.sweep.dir={sweep}", own % told, *arguments) == 0
    done, pruned = read_job_records(sweep)
    assert (done.status, pruned.status) == ("completed", "pruned")
    run = Path(str(pruned.folder))
    assert json.loads((run / "run.json").read_text())["stopped"] == {"step": 2, "of": 4, "reason": "pruned"}
    assert (run / "checkpoints/step_00000002/complete").exists()
    losses = {n: rows(Path(str(o.folder)), "eval/loss") for n, o in enumerate((done, pruned))}
    expected = [(n, row["step"], row["eval/loss"]) for n in (0, 1) for row in losses[n] if row["step"] < 4]
    words = [line.split() for line in told.read_text().splitlines()]
    assert [(int(number), int(step), float(loss)) for number, step, loss in words] == expected
    assert pruned.loss == expected[-1][2]


def test_a_pruner_that_lies_in_the_folder_of_a_sweep_is_not_called(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    leave_pruner(sweep, "os:system", {"command": f"touch {tmp_path / 'ran'}"})
    GlobalHydra.instance().clear()
    short = (*SMALL, "run.seed=0", "run.max_steps=1", f"run.output_dir={tmp_path}")
    assert call_here("-m", f"hydra.sweep.dir={sweep}", *short) == 0
    assert not (tmp_path / "ran").exists()


def test_jobs_that_share_a_name_do_not_go_on_in_each_others_folder(tmp_path: Path) -> None:
    """The same sweep with more steps continues every job in its own folder, and once more does nothing."""
    sweep = ("-m", *SMALL, "checkpoint.resume=auto", f"run.output_dir={tmp_path}")
    longer = (2, ("run.log_num_zeros=true", "optimizer.max_grad_norm=0.50"))
    for (steps, more), code in (((1, ()), 0), (longer, 0), (longer, 0), ((2, ()), 2)):
        words = ("run.seed=0,1", f"run.max_steps={steps}", "run.name=both", *more)
        assert call_here(*sweep, *words) == code
    _, trained, repeated, changed = map(read_job_records, sorted((tmp_path / "sweeps").iterdir()))
    assert [replace(job, seconds=0) for job in repeated] == [replace(job, seconds=0) for job in trained]
    assert {job.status for job in changed} == {"invalid"}
    runs = sorted((tmp_path / "both").iterdir())
    seeds = [yaml.safe_load((run / "config.yaml").read_text())["run"]["seed"] for run in runs]
    assert seeds == [0, 1]
    assert [[row["step"] for row in rows(run, "train/loss")] for run in runs] == [[1, 2], [1, 2]]


def test_a_job_whose_time_is_up_is_no_finished_one(tmp_path: Path) -> None:
    sweep = ("-m", *SMALL, f"run.output_dir={tmp_path}", "run.seed=0")
    assert call_here(*sweep, "run.max_steps=10000", "run.max_time=1") == 0
    (outcome,) = read_job_records(next((tmp_path / "sweeps").iterdir()))
    assert outcome.status == "interrupted"
    assert outcome.loss is not None
