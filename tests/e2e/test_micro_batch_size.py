"""``run.micro_batch_size=auto``: the most rows that fit, which change nothing in the curve."""

from pathlib import Path
from typing import Any

import pytest

from runner.records.run_dir import read_run_config
from tests.e2e.commands import SMALL, curve, rows, run_here

SAVED = (*SMALL, "checkpoint.save_every=2")


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["train/loss"] for row in rows if "train/loss" in row]


def test_the_curve_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """A run whose size was chosen has the curve of one row, and resumes with one row."""
    chosen = run_here(tmp_path / "chosen", *SAVED, "run.micro_batch_size=auto")
    assert read_run_config(chosen)["run"]["micro_batch_size"] == 4, "the whole batch fits"
    one = run_here(tmp_path / "one", *SAVED, "run.micro_batch_size=1")
    assert losses(curve(chosen)) == pytest.approx(losses(curve(one)), rel=1e-5)
    halfway = f"checkpoint.resume={chosen}/checkpoints/step_00000002"
    rest = run_here(tmp_path / "rest", *SAVED, "run.micro_batch_size=1", halfway)
    assert [row["step"] for row in rows(rest, "train/loss")] == [3, 4]
    assert losses(curve(rest)) == pytest.approx(losses(curve(one))[2:], rel=1e-5)
