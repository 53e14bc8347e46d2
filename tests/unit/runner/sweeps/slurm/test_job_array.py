"""The final records of ended jobs, and the handling of Ctrl-C."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.records.job_record import JobRecord, SweepJob, read_job_record
from runner.records.run_record import RunRecord, Stopped
from runner.signals import REQUESTS, handling, interrupt
from runner.sweeps.slurm import job_array
from runner.sweeps.slurm.job_array import JobArray, Queue, SubmittedJob, finalize_job, wants_cancel


@pytest.fixture
def job(tmp_path: Path) -> SubmittedJob:
    return SubmittedJob("17_2", SweepJob(tmp_path, 2, ("run.seed=2",)), tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def settled(job: SubmittedJob, state: str, *, cancelled: bool = False, **left: Any) -> JobRecord:
    """Return the final record of a job that had written ``left`` before."""
    if left:
        job.sweep_job.write(JobRecord(**({"number": 2, "overrides": job.sweep_job.overrides} | left)))
    finalize_job(job, state, "Why", cancelled=cancelled)
    return read_job_record(job.sweep_job.path)


@pytest.mark.parametrize("status", ["completed", "pruned", "invalid"])
def test_what_ended_well_stays(job: SubmittedJob, status: str) -> None:
    assert settled(job, "COMPLETED", status=status, loss=2.0).status == status


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "TIMEOUT", "CANCELLED"])
@pytest.mark.parametrize("status", ["completed", "interrupted", "running"])
def test_slurm_has_the_last_word(job: SubmittedJob, run: Path, state: str, status: str) -> None:
    outcome = settled(job, state, status=status, folder=str(run))
    assert outcome.status == "failed"
    assert f"SLURM job 17_2: {state} (Why)" in str(outcome.error)


@pytest.mark.parametrize(("reason", "status"), [("run.max_time", "interrupted"), ("SIGTERM", "failed")])
def test_a_run_whose_time_was_up_has_not_failed(
    job: SubmittedJob, run: Path, reason: str, status: str
) -> None:
    """It may have stopped before its first loss was logged."""
    RunRecord(stopped=Stopped(3, 9, reason)).write(run)
    assert settled(job, "COMPLETED", status="interrupted", folder=str(run)).status == status


def test_a_job_that_never_spoke(job: SubmittedJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.log.write_text("one\nslurmstepd: error: killed\n")
    outcome = settled(job, "OUT_OF_MEMORY")
    assert outcome == JobRecord(2, ("run.seed=2",), "failed", error=outcome.error)
    end = "\n  one\n  slurmstepd: error: killed\nSLURM job 17_2: OUT_OF_MEMORY (Why)"
    assert str(outcome.error).endswith(end)
    assert str(outcome.error) in capsys.readouterr().err


def test_the_rank_that_failed_first_is_blamed(job: SubmittedJob, run: Path) -> None:
    for rank, time, text in ((0, 2.0, ": Connection closed by peer"), (3, 1.0, " failed:\nboom\n")):
        facts = {"rank": rank, "time": time, "text": text, "final": False, "stalled": False}
        (run / "logs" / f"error_{rank}.json").write_text(json.dumps(facts))
    outcome = settled(job, "FAILED", status="failed", folder=str(run), error="Connection closed by peer")
    assert str(outcome.error).splitlines() == ["TrainingError: rank 3 failed:", "boom"]


def test_what_we_cancelled_has_stopped(job: SubmittedJob) -> None:
    assert settled(job, "CANCELLED", cancelled=True).status == "interrupted"


@pytest.mark.parametrize(
    ("answer", "cancels"),
    [
        ("y", True),
        ("n", False),
        ("", False),
        (KeyboardInterrupt("SIGINT"), True),
        (KeyboardInterrupt("SIGHUP"), False),
        (EOFError, False),
    ],
)
def test_ctrl_c_asks_at_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: Any, cancels: bool) -> None:
    def answers(_: str) -> str:
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr("builtins.input", answers)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert wants_cancel(3) is cancels
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert wants_cancel(3)


@pytest.fixture
def squeue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that puts a ``squeue`` with the given lines of bash in front of the real one."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "bin").mkdir()

    def write(lines: str) -> None:
        path = tmp_path / "bin" / "squeue"
        path.write_text(f"#!/bin/bash\n{lines}\n")
        path.chmod(0o755)

    return write


def test_a_queue_that_does_not_answer_and_one_that_forgets(
    job: SubmittedJob, squeue: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue([job])
    squeue("echo '17_2|RUNNING|None'; echo '17_3|PENDING|Priority'")
    assert queue.ask() == {"17_2": ("RUNNING", "None")}
    squeue("echo '17_1|COMPLETED|None'; echo '17_[2-3%2]|CANCELLED|Cancelled'")
    assert queue.ask() == {"17_2": ("CANCELLED", "Cancelled")}
    squeue("echo '17_2|RUNNING|None'")
    queue.ask()
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert queue.ask() == {"17_2": ("RUNNING", "None")}
    assert "Unable to contact" in capsys.readouterr().err
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert queue.ask() == {"17_2": (job_array.NOT_IN_QUEUE, "")}


@pytest.mark.parametrize("number", REQUESTS)
def test_jobs_that_are_left_to_slurm(
    job: SubmittedJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """After a lost connection there is no terminal, and the jobs still run."""
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    monkeypatch.setattr(JobArray, "watch", lambda _: os.kill(os.getpid(), number))
    monkeypatch.setattr(job_array, "wants_cancel", lambda _: number != signal.SIGINT)
    try:
        with handling(interrupt), pytest.raises(SystemExit, match="130"):
            JobArray([job]).wait()
    finally:
        signal.signal(number, before)
    assert "left to SLURM: squeue --jobs 17;" in capsys.readouterr().out
    assert not job.sweep_job.path.exists()
