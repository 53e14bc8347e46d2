"""Runs that are finished by a restart, refused or failed, or complete although stdout is closed."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.checkpoint import CheckpointManager, manager
from components.loggers import CompositeLogger, RunResult
from components.models.export import hf_folder
from runner.launch import final_report
from runner.launch.run_lock import locked
from tests.e2e.commands import EXPORTING, Command, call_here, newest, run_here

TWO = (*EXPORTING, "run.max_steps=2", "run.final_sample_tokens=0")
ALL_SKIPPED = ("stage._target_=tests.e2e.losses.Scaled", "run.max_consecutive_skips=9")


def facts(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[RunResult]:
    """How the trackers of the runs in this process are told that these have ended."""
    found: list[RunResult] = []
    monkeypatch.setattr(CompositeLogger, "finish", lambda _, ending: found.append(ending))
    return found


def test_a_run_killed_before_its_export_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_here(tmp_path, *TWO)
    exported = files(run / "export")
    shutil.rmtree(run / "export")
    (run / "run.json").write_text(json.dumps(facts(run) | {"ended": None, "final_step": None}))
    assert run_here(tmp_path, *TWO, "checkpoint.resume=auto") == run
    assert files(run / "export") == exported
    assert (facts(run)["ended"], facts(run)["final_step"]) == ("completed", 2)
    assert call_here(f"run.output_dir={tmp_path}", *TWO, "checkpoint.resume=auto") == 2
    assert "raise run.max_steps" in capsys.readouterr().err


def test_a_run_in_use_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_here(tmp_path, *TWO, "run.export=false")
    with locked(run):
        before = files(run)
        code = call_here(f"run.output_dir={tmp_path}", *TWO, "run.max_steps=3", "checkpoint.resume=auto")
        assert (code, files(run)) == (2, before)
    assert f"{run} is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert run_here(tmp_path, *TWO, "run.max_steps=3", "checkpoint.resume=auto") == run


def test_a_run_that_trains_nothing_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], endings: list[RunResult]
) -> None:
    assert call_here(f"run.output_dir={tmp_path}", *TWO, *ALL_SKIPPED) == 1
    assert "all 2 steps were skipped" in capsys.readouterr().err
    run = newest(tmp_path)
    assert [facts(run)["ended"], *(ending.status for ending in endings)] == ["failed"] * 2
    assert not (run / "export").exists()


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/file")


def test_a_lost_last_checkpoint_is_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    endings: list[RunResult],
) -> None:
    save = manager.save_tensors

    def save_once(path: Path, *args: Any) -> Any:
        return save(path, *args) if path.name == "step_00000001" else full_disk()

    monkeypatch.setattr(manager, "save_tensors", save_once)
    options = ("checkpoint.save_every=1", "checkpoint.on_error=continue")
    assert call_here(f"run.output_dir={tmp_path}", *TWO, *options) == 1
    run, printed = newest(tmp_path), capsys.readouterr()
    newest_one = run / "checkpoints" / "step_00000001"
    assert f"checkpoint  {newest_one}" in printed.out
    assert "the checkpoint of step 2 could not be written, as the log says" in printed.err
    (ending,) = endings
    assert (facts(run)["ended"], facts(run)["error"]) == (ending.status, ending.reason)
    assert ending.status == "failed"
    assert str(newest_one) in facts(run)["error"]
    assert (run / "export").is_dir()


def test_a_full_disk_in_the_export(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    endings: list[RunResult],
) -> None:
    monkeypatch.setattr(hf_folder, "write_safetensors", full_disk)
    assert call_here(f"run.output_dir={tmp_path}", *TWO) == 1
    message = capsys.readouterr().err
    assert "error: /full/file: could not be written: No space left on device" in message
    assert "Traceback" not in message
    assert [ending.status for ending in endings] == ["failed"]
    monkeypatch.undo()
    run = newest(tmp_path)
    assert run_here(tmp_path, *TWO, "checkpoint.resume=auto") == run
    assert (run / "export" / "model.safetensors").is_file()


def test_a_completion_is_left_out_where_it_needs_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(final_report, "machine_memory", lambda: 2**20)
    run_here(tmp_path, *EXPORTING, "run.max_steps=1", "run.eval_at_end=false")
    assert "completion  left out: the weights take 2 MiB, over half of the free" in capsys.readouterr().out


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_removed_folder_is_named(
    tmp_path: Path, on_error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = CheckpointManager.save

    def remove_before(checkpoints: CheckpointManager, *args: Any) -> None:
        if checkpoints.current is not None:
            shutil.rmtree(checkpoints.folder.parent)
        save(checkpoints, *args)

    monkeypatch.setattr(CheckpointManager, "save", remove_before)
    options = ("checkpoint.save_every=1", f"checkpoint.on_error={on_error}")
    assert call_here(f"run.output_dir={tmp_path}", *TWO, *options) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "was removed, or its run.json was, while the run was under way" in capsys.readouterr().err


def test_the_end_of_a_run_inside_the_window_of_the_profiler(tmp_path: Path, endings: list[RunResult]) -> None:
    stopping = ("early_stopping.metric=eval/loss", "early_stopping.patience=1", "run.eval_every=1")
    window = ("profiler.enabled=true", "profiler.steps=[2,4]", "optimizer.lr=0", "run.export=false")
    run = run_here(tmp_path, *TWO, "run.max_steps=4", *stopping, *window)
    assert facts(run)["final_step"] == 2
    assert [facts(run)["ended"], *(ending.status for ending in endings)] == ["completed"] * 2
    assert (run / "profile" / "step_2_rank_0.json").is_file()
    assert "profile of steps 2 to 2" in (run / "train.log").read_text()


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    "output", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "full"]
)
@pytest.mark.parametrize("ranks", [(), ("parallelism=fsdp2",)], ids=["one", "two"])
def test_a_run_without_a_reader_completes(
    tmp_path: Path, output: Callable[[], int], ranks: tuple[str, ...]
) -> None:
    descriptor = output()
    command = Command(f"run.output_dir={tmp_path}", *TWO, *ranks, cwd=tmp_path, stdout=descriptor)
    os.close(descriptor)
    done = command.finish()
    assert done.returncode == 0, done.stderr
    run = newest(tmp_path)
    assert facts(run)["ended"] == "completed"
    assert "stdout cannot be written" in done.stderr + (run / "train.log").read_text()
    assert "saved" in (run / "train.log").read_text()
