"""All trackers have the same numbers of a run that failed and resumed, and a run needs no tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.records.run_record import RunRecord
from runner.training import loop
from tests.e2e.commands import SMALL, Command, call_here, curve, newest, rows, run_here
from tests.trackers import scalars, tags, wandb_runs


def two_starts(*options: str) -> None:
    """Run a command that fails after step 5, and run it again."""
    arguments = [*SMALL, *options, "run.max_steps=6", "checkpoint.save_every=3", "run.eval_every=2"]
    arguments += ["run.export=false"]
    train_step = loop.train_step

    def breaks(training: loop.TrainContext) -> None:
        train_step(training)
        if training.state.step == 5 and training.checkpoint.resume != "auto":
            raise RuntimeError("in step 5")

    loop.train_step = breaks
    assert call_here(*arguments) == 1
    assert call_here(*arguments, "checkpoint.resume=auto") == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that failed after step 5 and resumed from its checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("trackers")
    options = ["logger=[jsonl,tensorboard,wandb]", "logger.wandb.mode=offline", f"run.output_dir={folder}"]
    answer = Command(*options, cwd=folder, call=two_starts).finish()
    assert answer.returncode == 0, answer.stderr
    return newest(folder)


def logged(run: Path, first: int = 1) -> dict[int, dict[str, Any]]:
    """Return the values in metrics.jsonl by step, without nulls."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows(run):
        if row["step"] >= first:
            values = {key: value for key, value in row.items() if key != "step" and value is not None}
            found.setdefault(row["step"], {}).update(values)
    return found


def test_wandb_has_what_jsonl_has(run: Path) -> None:
    failed, done = wandb_runs(run)
    assert sorted(failed.history) == [1, 2, 3, 4, 5]
    assert done.history == logged(run, first=4)
    assert {step: failed.history[step] for step in (1, 2, 3)} == {
        step: row for step, row in logged(run).items() if step <= 3
    }


def test_wandb_knows_it_as_one_run(run: Path) -> None:
    failed, done = wandb_runs(run)
    assert failed.start.run_id == done.start.run_id
    assert (failed.exit_code, done.exit_code) == (1, 0)
    assert (failed.summary["status"], failed.summary["reason"]) == ("failed", "RuntimeError: in step 5")
    assert done.summary["eval/loss"] == rows(run, "eval/loss")[-1]["eval/loss"]
    assert done.summary["train/loss"] == rows(run, "train/loss")[-1]["train/loss"]
    assert done.artifact_files >= {"config.yaml", "run.json", "audit.json"}


def test_tensorboard_has_what_jsonl_has(run: Path) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for step, values in logged(run).items():
        for key, value in values.items():
            expected.setdefault(key, []).append((step, float(np.float32(value))))
    found = scalars(run / "tensorboard")
    assert {key: points for key, points in found.items() if not key.startswith("final/")} == expected
    assert found["final/eval/loss"] == expected["eval/loss"][-1:]
    assert {"config/text_summary", "_hparams_/session_start_info"} <= tags(run / "tensorboard")


def test_run_json_has_the_results(run: Path) -> None:
    record = RunRecord.read(run)
    assert record.ended == "completed"
    assert record.error is None
    assert record.results.last.items() >= finite(rows(run, "train/loss")[-1]).items()
    assert record.results.last["eval/loss"] == rows(run, "eval/loss")[-1]["eval/loss"]


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def test_a_run_without_loggers_is_quiet_and_has_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loud = run_here(tmp_path / "loud", *SMALL)
    assert "step 4  eval: loss" in capfd.readouterr().err
    quiet = run_here(tmp_path / "quiet", *SMALL, "logger=[]")
    shown = capfd.readouterr()
    assert "step" not in shown.err
    assert not (quiet / "metrics.jsonl").exists()
    assert "step 4  eval: loss" in (quiet / "train.log").read_text()
    assert f"{rows(loud, 'train/loss')[0]['train/loss']:.4f} at step 1" in shown.out
    assert "eval loss" in shown.out
    same = [key for key in curve(loud)[3] if key.startswith("train/")]
    assert [RunRecord.read(folder).results.last[key] for folder in (loud, quiet) for key in same] == [
        rows(loud, key)[-1][key] for key in same
    ] * 2
