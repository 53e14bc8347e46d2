"""Parallel local jobs: their number, their share of the machine, and the record of one that dies."""

import os
import re
import sys
from pathlib import Path

import pytest

from components.rank_info import CORES, GPU_SHARERS, MEMORY_SHARERS
from runner.records.job_record import SweepJob, read_job_records
from runner.sweeps.local_jobs import LocalJob, machine_share, run_jobs

WELL = """
import os, sys, time
from pathlib import Path
from runner.records.job_record import SweepJob
began = time.time()
assert sys.stdin.read() == "given"
time.sleep(0.3)
SweepJob(Path(sys.argv[1]), int(sys.argv[2]), ()).finish("completed", loss=0.5, seconds=1.0)
print(began, time.time())
"""
KILLED = "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


def job(sweep: Path, number: int, code: str) -> LocalJob:
    command = [sys.executable, "-c", code, str(sweep), str(number)]
    return LocalJob(SweepJob(sweep, number, (f"seed={number}",)), command, b"given")


def test_no_more_than_so_many_at_once_and_one_that_is_killed_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_jobs([job(tmp_path, n, KILLED if n == 1 else WELL) for n in range(5)], at_once=2)
    outcomes = read_job_records(tmp_path)
    assert [outcome.status for outcome in outcomes] == [
        "completed",
        "failed",
        "completed",
        "completed",
        "completed",
    ]
    assert str(outcomes[1].error).startswith("the job was killed by SIGKILL")
    assert str(outcomes[1].error).endswith("\n  last words")
    told = capfd.readouterr().err
    assert re.search(r"job 1: failed after \d+ s  seed=1", told)
    assert "last words" in told
    spans = [[*map(float, (tmp_path / f"jobs/{n}.log").read_text().split())] for n in (0, 2, 3, 4)]
    running = [sum(began <= at < ended for began, ended in spans) for at, _ in spans]
    assert max(running) == 2


@pytest.mark.parametrize(
    ("places", "gpus", "dealt", "sharers"),
    [
        (2, ["0", "1", "2", "3"], ["0,1", "2,3"], [None, None]),
        (2, ["4", "5", "6"], ["4", "5,6"], [None, None]),
        (3, ["a", "b"], ["a", "a", "b"], ["2", "2", None]),
        (2, [], [None, None], [None, None]),
    ],
)
def test_a_machine_is_shared(
    places: int,
    gpus: list[str],
    dealt: list[str | None],
    sharers: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    shares = [machine_share(place, places, gpus) for place in range(places)]
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in shares] == dealt
    assert [one.get(GPU_SHARERS) for one in shares] == sharers
    assert {one[MEMORY_SHARERS] for one in shares} == {str(places)}
    assert {one["OMP_NUM_THREADS"] for one in shares} == {one[CORES] for one in shares} == {str(7 // places)}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert CORES not in machine_share(0, places, gpus), "threads are the user's"
