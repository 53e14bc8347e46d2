"""Which micro-batch sizes are halved after a trial step that needs too much memory."""

from pathlib import Path

import pytest

from runner.records.run_dir import read_run_config, write_config
from runner.records.run_record import RunRecord
from runner.training.rank import lower_micro_batch_size


@pytest.mark.parametrize(
    ("chosen", "ranks", "lower"),
    [(12, 1, 6), (6, 1, 3), (3, 1, 1), (1, 1, None), (None, 1, None), (6, 2, None)],
)
def test_the_next_lower_size(chosen: int | None, ranks: int, lower: int | None, tmp_path: Path) -> None:
    """It divides the batch. A size that was given, and that of several ranks, does not change."""
    groups = {"model": {}, "adapter": {}, "checkpoint": {}}
    write_config(tmp_path, {**groups, "run": {"global_batch_size": 12, "micro_batch_size": chosen or 6}})
    RunRecord(world_size=ranks, auto_micro_batch_size=chosen).write(tmp_path)
    assert lower_micro_batch_size(tmp_path) == (lower is not None)
    expected = chosen if lower is None else lower
    assert RunRecord.read(tmp_path).auto_micro_batch_size == expected
    assert read_run_config(tmp_path)["run"]["micro_batch_size"] == (expected or 6)
