"""A signal or a time limit at any point leaves a run that can be resumed, or no run at all."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.checkpoint.manager import CheckpointManager
from components.data.store.token_store import StoreWriter
from components.engines.fsdp2.engine import FSDP2Engine
from runner.records.run_record import RunRecord
from tests.e2e.commands import SMALL, call_here, curve, newest, rows, run_here

SIX = (*SMALL, "run.max_steps=6", "run.global_batch_size=2")
SIGNALLED = "stage._target_=tests.e2e.losses.Signalled"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_here(tmp_path_factory.mktemp("straight"), *SIX, "run.eval_every=4")


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*") if (path / "complete").exists())


def stopped(run: Path) -> dict[str, Any] | None:
    return json.loads((run / "run.json").read_text())["stopped"]


def sending(before: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    def replaced(*args: Any, **options: Any) -> Any:
        for number in numbers:
            os.kill(os.getpid(), number)
        return before(*args, **options)

    return replaced


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_in_a_step(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # nohup runs these tests, and a run respects it
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    told = (SIGNALLED, f"+stage.numbers=[{number.value}]", "run.eval_every=4")
    first = run_here(tmp_path, *SIX, *told)
    assert saved(first) == ["step_00000003"]
    assert stopped(first) == {"step": 3, "of": 6, "reason": number.name}
    said = capsys.readouterr().out
    assert f"stopped at step 3 ({number.name}); resume with: python -m runner " in said
    assert f"checkpoint.resume={first}/checkpoints/step_00000003" in said
    assert signal.getsignal(number) is before
    if number is signal.SIGTERM:
        assert run_here(tmp_path, *SIX, "run.eval_every=4", "checkpoint.resume=auto") == first
        assert curve(first) == curve(straight)
        assert stopped(first) is None


def test_in_an_evaluation_which_is_left_to_the_run_that_goes_on(tmp_path: Path) -> None:
    told = (SIGNALLED, "+stage.training=false", "+stage.at=1", "run.eval_every=2")
    run = run_here(tmp_path / "first", *SIX, *told)
    assert saved(run) == ["step_00000002"]
    assert not any("eval/loss" in row for row in curve(run))
    rest = run_here(tmp_path / "rest", *SIX, "run.eval_every=2", f"checkpoint.resume={run}")
    assert [row["step"] for row in rows(rest, "eval/loss")] == [2, 4, 6]


def test_in_the_evaluation_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = (SIGNALLED, "+stage.training=false", "+stage.at=1", "run.eval_on_start=true")
    run = run_here(tmp_path, *SIX, *told)  # which asserts exit code 0
    assert stopped(run) == {"step": 0, "of": 6, "reason": "SIGTERM"}
    assert saved(run) == []
    assert json.loads((run / "run.json").read_text())["ended"] == "interrupted"
    assert "stopped at step 0 (SIGTERM), without a checkpoint" in capsys.readouterr().out


def test_in_a_save_which_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointManager, "save", sending(CheckpointManager.save, signal.SIGTERM))
    run = run_here(tmp_path, *SIX, "checkpoint.save_every=4")
    assert saved(run) == ["step_00000004"]
    assert stopped(run) == {"step": 4, "of": 6, "reason": "SIGTERM"}


def test_in_the_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The resumed run does the last evaluation and the export."""
    run = run_here(tmp_path / "first", *SIX, "run.export=true", SIGNALLED, "+stage.at=6")
    assert saved(run) == ["step_00000006"]
    assert not (run / "export").exists()
    assert "stopped at step 6 (SIGTERM); resume with: " in capsys.readouterr().out
    rest = run_here(tmp_path / "rest", *SIX, "run.export=true", f"checkpoint.resume={run}")
    assert [row["step"] for row in rows(rest)] == [6]
    assert (rest / "export").is_dir()


def test_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_here(f"run.output_dir={tmp_path}", *SIX, SIGNALLED, "+stage.numbers=[2,15]") == 130
    assert "nothing is left running" in capsys.readouterr().err
    run = newest(tmp_path)
    assert saved(run) == []
    results = RunRecord.read(run).results
    assert (results.first["step"], results.last["step"]) == (1, 2)


def test_while_tokenising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is kept for the next start, but not as if it was whole."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("RUNNER_CACHE", str(cache))
    monkeypatch.setattr(StoreWriter, "append", sending(StoreWriter.append, signal.SIGTERM))
    assert call_here(f"run.output_dir={tmp_path / 'o'}", *SIX) == 130
    assert not (tmp_path / "o").exists()
    assert not [path for path in cache.rglob("*") if path.name == "meta.json"]
    assert list(cache.rglob("progress.json"))


def test_when_its_time_is_up(tmp_path: Path) -> None:
    run = run_here(tmp_path, *SIX, "run.max_time=1s")
    assert stopped(run) == {"step": 1, "of": 6, "reason": "run.max_time"}
    assert saved(run) == ["step_00000001"]


def test_in_an_export_after_which_no_job_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDP2Engine, "export", sending(FSDP2Engine.export, signal.SIGTERM))
    options = (*SMALL, "run.max_steps=1", "run.export=true", "run.seed=0,1")
    assert call_here("-m", f"run.output_dir={tmp_path}", *options) == 0
    (run,) = tmp_path.glob("*/*/run.json")
    assert json.loads(run.read_text())["ended"] == "completed"
    assert (run.parent / "export").is_dir()


def test_a_sweep_ends_with_the_job_that_a_signal_stops(tmp_path: Path) -> None:
    code = call_here("-m", f"run.output_dir={tmp_path}", *SIX, SIGNALLED, "run.seed=0,1")
    assert code == 0
    assert len(list(tmp_path.glob("*/*/run.json"))) == 1


def test_what_cannot_be_done_twice_alike_is_refused_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undetermined = "stage._target_=tests.e2e.losses.Undetermined"
    assert call_here(f"run.output_dir={tmp_path}", *SIX, undetermined, "run.deterministic=true") == 1
    assert "deterministic implementation" in capsys.readouterr().err
    assert call_here(f"run.output_dir={tmp_path}", *SIX, undetermined) == 0


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_what_is_trained_with_can_be_done_twice_alike(tmp_path: Path, stage: str) -> None:
    words = (*SIX, "run.max_steps=2", f"stage={stage}", "run.deterministic=true")
    assert curve(run_here(tmp_path / "a", *words)) == curve(run_here(tmp_path / "b", *words))
