"""The failures that ``run.max_restarts`` restarts, with ranks that fail as each test specifies."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.checkpoint.file_records import FileRecord
from components.checkpoint.folder import CheckpointMeta, commit, complete_checkpoints, step_folder
from components.contracts.errors import ConfigError, NonRetryableError, TrainingError
from components.preflight.checks import check_restarts
from runner.launch import restart
from runner.launch.prepare import open_folder
from runner.records.run_record import RunRecord


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RunRecord().write(tmp_path)
    (tmp_path / "train.log").touch()
    return tmp_path


def log_steps(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in steps)


def checkpoint(folder: Path, step: int) -> None:
    path = step_folder(folder / "checkpoints", step)
    path.mkdir(parents=True)
    (path / "weights").write_text("whole")
    commit(path, CheckpointMeta({"step": step}, {}, model_only=False, files={"weights": FileRecord(5, "")}))


def world(monkeypatch: pytest.MonkeyPatch, *ends: Exception | None) -> list[str | None]:
    """Let each start log two steps and end as given; return the checkpoints from which starts resumed."""
    began: list[str | None] = []

    def start(folder: Path, world_size: int) -> None:
        began.append(RunRecord.read(folder).resumed_from)
        number = len(began)
        log_steps(folder, 2 * number - 1, 2 * number)
        if number > 1:
            checkpoint(folder, 2 * number - 1)
        if error := ends[number - 1]:
            raise error

    monkeypatch.setattr(restart, "run_workers", start)
    return began


def logged(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_checkpoint_that_was_written_after_the_choice_of_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that still wrote to the folder has ended, so that its lock does not stop this one.

    A requeued job names its folder by a relative path.
    """
    for step in (2, 4):
        checkpoint(folder, step)
    options = SimpleNamespace(
        run=SimpleNamespace(evaluate_only=False), checkpoint=SimpleNamespace(resume="auto")
    )
    chosen: Any = SimpleNamespace(previous_run_dir=None, resume=step_folder(folder / "checkpoints", 2))
    with ExitStack() as resources, pytest.raises(ConfigError, match=r"has just written .*step_00000004"):
        open_folder(SimpleNamespace(experiment=options, resources=resources), chosen)  # type: ignore[arg-type]
    monkeypatch.chdir(folder.parent)
    chosen.previous_run_dir, chosen.resume = Path(folder.name), step_folder(folder / "checkpoints", 4)
    with ExitStack() as resources:
        found = open_folder(SimpleNamespace(experiment=options, resources=resources), chosen)  # type: ignore[arg-type]
    assert found[0] == folder


def test_it_passes_over_a_damaged_checkpoint(folder: Path) -> None:
    log_steps(folder, 1, 2, 3, 4)
    for step in (2, 4):
        checkpoint(folder, step)
    (step_folder(folder / "checkpoints", 4) / "weights").write_text("")
    assert restart.go_back(folder, 1) == 2
    whole = step_folder(folder / "checkpoints", 2)
    assert RunRecord.read(folder).resumed_from == str(whole)
    assert complete_checkpoints(folder / "checkpoints") == [whole], (
        "nor is it what pruning takes for the newest"
    )
    assert logged(folder) == [1, 2]
    results = RunRecord.read(folder).results
    assert (results.first["step"], results.last["step"]) == (1, 2), "ranks had them only in memory"


def test_it_goes_on_from_the_newest_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = TrainingError("rank 1 was killed by SIGKILL\n  its log")
    began = world(monkeypatch, failure, failure, None)
    restart.run_with_restarts(folder, 2, max_restarts=3)
    assert began == [None, None, str(folder / "checkpoints" / "step_00000003")]
    assert logged(folder) == [3, 5, 6]
    assert RunRecord.read(folder).restarts == 2
    assert capsys.readouterr().err.splitlines() == [
        "restart 1 of 3, from step 0: rank 1 was killed by SIGKILL",
        "restart 2 of 3, from step 3: rank 1 was killed by SIGKILL",
    ]
    assert "its log" in (folder / "train.log").read_text()


def test_the_last_failure_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = world(monkeypatch, TrainingError("one"), TrainingError("two"))
    with pytest.raises(TrainingError, match="two"):
        restart.run_with_restarts(folder, 2, max_restarts=1)
    assert len(began) == 2


@pytest.mark.parametrize("error", [NonRetryableError("diverged"), KeyboardInterrupt()])
def test_some_ends_are_final(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    began = world(monkeypatch, error)
    with pytest.raises(type(error)):
        restart.run_with_restarts(folder, 2, max_restarts=5)
    assert len(began) == 1


def test_a_launcher_restarts_its_own_ranks() -> None:
    check_restarts(0, joined=True)
    check_restarts(3, joined=False)
    with pytest.raises(ConfigError, match=r"run\.max_restarts: .*torchrun --max-restarts"):
        check_restarts(3, joined=True)
