"""``-m``: jobs one after another in one process, each as if alone."""

from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.e2e.commands import SMALL, call_here, command, curve, rows, run_command, run_here


def test_four_jobs(tmp_path: Path) -> None:
    sweep = ["-m", *SMALL, "optimizer.lr=1e-3,3e-3", "stage=pt,sft", "run.export=false"]
    answer = run_command(command(*sweep, f"run.output_dir={tmp_path}"), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    runs = sorted(tmp_path.glob("*_tiny/*/metrics.jsonl"))
    assert len(runs) == 4
    alone = run_here(tmp_path / "alone", *SMALL, "stage=sft", "optimizer.lr=3e-3", "run.export=false")
    assert curve(alone) in [curve(path.parent) for path in runs]


def test_the_returned_value_is_the_final_eval_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[float] = []
    from runner import launch

    original = launch.run
    monkeypatch.setattr(
        "runner.launch.run", lambda *a, **k: returned.append(original(*a, **k)) or returned[-1]
    )
    run = run_here(tmp_path, *SMALL, "run.export=false")
    assert returned == [rows(run, "eval/loss")[-1]["eval/loss"]]


def test_a_sweep_under_torchrun_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    assert call_here("-m", *SMALL, "run.seed=1,2", f"run.output_dir={tmp_path}") == 2
    assert "torchrun" in capsys.readouterr().err


def test_half_a_launcher_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert call_here(*SMALL, f"run.output_dir={tmp_path}") == 2
    assert "LOCAL_RANK, WORLD_SIZE is not" in capsys.readouterr().err


def test_a_failed_job_gives_a_failing_exit_code(tmp_path: Path) -> None:
    GlobalHydra.instance().clear()
    assert call_here("-m", *SMALL, "run.global_batch_size=4,5", f"run.output_dir={tmp_path}") == 2
