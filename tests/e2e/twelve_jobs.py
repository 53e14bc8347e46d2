"""A sweep of twelve jobs over learning rate, layout (of both engines) and model, for any launcher.

Nine jobs complete, two are refused, and one fails.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from components.schedulers import Constant
from runner.records.job_record import JobRecord, read_job_records
from tests.e2e.commands import SMALL

RATES, LAYOUTS, LAYERS = ("1e-3", "3e-3"), ("single", "megatron", "pp2"), ("2", "3")
POINTS = [
    (f"optimizer.lr={rate}", f"parallelism={layout}", f"model.architecture.num_hidden_layers={layers}")
    for rate in map(float, RATES)
    for layout in LAYOUTS
    for layers in LAYERS
]
REFUSED = [number for number, point in enumerate(POINTS) if "pp2" in point[1] and "=3" in point[2]]
FAILED = [POINTS.index(("optimizer.lr=0.003", "parallelism=pp2", "model.architecture.num_hidden_layers=2"))]
STATUSES = ["invalid" if n in REFUSED else "failed" if n in FAILED else "completed" for n in range(12)]

SWEPT = (
    f"optimizer.lr={','.join(RATES)}",
    f"parallelism={','.join(LAYOUTS)}",
    f"model.architecture.num_hidden_layers={','.join(LAYERS)}",
)
SWEEP = (
    *(word for word in SMALL if "num_hidden_layers" not in word),
    "run.max_steps=2",
    "checkpoint.model_only=true",
    "scheduler=constant",
    "scheduler._target_=tests.e2e.twelve_jobs.Breaks",
    *SWEPT,
)


@dataclass(frozen=True)
class Breaks(Constant):
    """A schedule that fails in the second step on all ranks except the first if the rate is 3e-3."""

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        if step == 1 and peak == 3e-3 and os.environ.get("RANK", "0") != "0":
            raise RuntimeError("this rank does not like 3e-3")
        return super().lr(step, peak=peak, total_steps=total_steps)


def check_outcomes(sweep: Path) -> list[JobRecord]:
    """Check that each job has the expected status and its own folder, and that engines agree."""
    records = read_job_records(sweep)
    assert [record.number for record in records] == list(range(12))
    assert [record.overrides[-3:] for record in records] == POINTS
    assert [record.status for record in records] == STATUSES
    for number in REFUSED:
        assert records[number].folder is None
        assert "num_hidden_layers" in str(records[number].error)
    (broken,) = (records[number] for number in FAILED)
    assert str(broken.error).startswith("TrainingError: rank 1 failed:")
    assert "RuntimeError: this rank does not like 3e-3" in str(broken.error)
    begun = [record for record in records if record.folder is not None]
    assert len({record.folder for record in begun}) == len(begun) == 10
    for record in begun:
        facts = json.loads((Path(str(record.folder)) / "run.json").read_text())
        swept = list(POINTS[record.number])
        assert facts["sweep"] == {"folder": str(sweep), "number": record.number, "swept": swept}
    for rate in range(2):
        two_layers = records[6 * rate : 6 * rate + 6 : 2]
        first, *others = (record.loss for record in two_layers if record.status == "completed")
        assert others == pytest.approx([first] * len(others), rel=1e-5)
    return records


def check_table(shown: str) -> None:
    """Check that the table has a row for each job, and the errors of three of them."""
    rows = [line for line in shown.splitlines() if re.match(r" *\d+  ", line)]
    assert [row.split()[:5] for row in rows] == [
        [str(number), *(word.partition("=")[2] for word in point), STATUSES[number]]
        for number, point in enumerate(POINTS)
    ]
    assert sum(" * " in row for row in rows) == 1, "one of them is the best"
    assert shown.count("invalid: parallelism.pp: 2 does not divide") == 2
    assert shown.count("failed: RuntimeError: this rank does not like 3e-3") == 1
    assert "9 completed, 2 invalid, 1 failed" in shown
