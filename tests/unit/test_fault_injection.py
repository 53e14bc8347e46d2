"""The driver that kills runs detects the faults that it looks for."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.fault_injection import Run, last_tensors, orphans, unreadable
from components.checkpoint.dcp import save_tensors
from components.checkpoint.folder import CheckpointMeta, commit, step_folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run with two marked checkpoints and one that is being written."""
    run = Run(tmp_path, "fsdp2", 10)
    for step in (2, 4, 6):
        folder = step_folder(tmp_path / "chaos" / "stamp" / "checkpoints", step)
        folder.mkdir(parents=True)
        files = save_tensors(folder, {"model/weight": torch.full((2, 3), float(step))})
        if step < 6:
            commit(folder, CheckpointMeta({"step": step}, {}, model_only=False, files=files))
    return run


def test_what_is_whole_and_what_is_not(run: Run) -> None:
    assert run.torn() == {"step_00000006"}
    assert list(unreadable(run)) == []
    assert torch.equal(last_tensors(run)["model/weight"], torch.full((2, 3), 4.0))


def test_a_marked_but_truncated_one_is_found(run: Run) -> None:
    (shard,) = (run.checkpoints / "step_00000002").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-40])
    (found,) = unreadable(run)
    assert found.startswith("step_00000002: ")


def test_a_process_that_stays_is_an_orphan() -> None:
    stays, goes = (
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"]) for seconds in (60, 0)
    )
    assert orphans([psutil.Process(process.pid) for process in (stays, goes)], within=2) == 1
    stays.kill()


def test_rows_are_counted_in_the_newest_folder(run: Run) -> None:
    assert run.logged() == (0, 0)
    (run.current / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.logged()[1] == 2
    assert run.rows_at_start() == 4
