"""The jobs of a sweep in SLURM's queue: watch them, cancel them, and record the outcome of each."""

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from components.contracts.errors import INTERRUPTED
from runner.config.command_line import hydra_value
from runner.records.failures import read_failure_reports, read_last_lines, root_cause
from runner.records.job_record import JobRecord, SweepJob, read_job_record
from runner.records.run_record import stop_reason

OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
NOT_IN_QUEUE = "NO LONGER IN THE QUEUE"
"""State of a job that squeue no longer lists: it ended long ago, or was cancelled before it began."""
LAST_POLL_S, PATIENCE_S = 30.0, 60.0
"""Longest interval between two calls of squeue, and time in which cancelled jobs may save, in seconds."""
WRITING_S = 10.0
"""Maximum time in seconds until a file that another node has written is visible here."""


@dataclass(frozen=True)
class SubmittedJob:
    """One job of the array, with an id such as ``17_2``, or ``17`` if it is the only job."""

    id: str
    sweep_job: SweepJob
    logs: Path

    @property
    def log(self) -> Path:
        """Log of rank 0 and of the job script."""
        return self.logs / f"{self.id}_0_log.out"


class Queue:
    """The states of some jobs, from ``squeue``, which works with or without an accounting database."""

    def __init__(self, jobs: Sequence[SubmittedJob]) -> None:
        self.arrays = ",".join(sorted({job.id.split("_")[0] for job in jobs}))
        self.known = {job.id: ("PENDING", "") for job in jobs}

    def ask(self) -> dict[str, tuple[str, str]]:
        """Return (state, reason) of every job by id, or the last known ones if squeue fails."""
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", "--jobs"]
        answer = subprocess.run([*command, self.arrays], capture_output=True, text=True, check=False)
        if answer.returncode and "Invalid job id" not in answer.stderr:
            print(f"squeue: {answer.stderr.strip()}; asking again", file=sys.stderr)
            return self.known
        rows = (line.split("|") for line in answer.stdout.splitlines())
        found = {number: (state, reason) for number, state, reason in rows}
        # Tasks that were cancelled with their array before they began are listed as one: 17_[3-5].
        rest = {number.partition("_[")[0]: said for number, said in found.items() if "[" in number}
        unknown = (NOT_IN_QUEUE, "")
        self.known = {n: found.get(n, rest.get(n.split("_")[0], unknown)) for n in self.known}
        return self.known


class JobArray:
    """The jobs of a sweep in SLURM's queue. The record of each job is completed when the job has ended."""

    def __init__(self, jobs: Sequence[SubmittedJob]) -> None:
        self.jobs, self.queue = {job.id: job for job in jobs}, Queue(jobs)
        self.shown: dict[str, str] = {}

    def wait(self) -> None:
        """Wait until all jobs are over.

        Raises:
            KeyboardInterrupt: after Ctrl-C, if the jobs are cancelled.
            SystemExit: after Ctrl-C, if the user leaves the jobs to SLURM, and after any other signal.
        """
        try:
            self.watch()
        except KeyboardInterrupt as request:
            if not is_ctrl_c(request) or not wants_cancel(len(self.jobs)):
                print(f"left to SLURM: squeue --jobs {self.queue.arrays}; scancel {self.queue.arrays}")
                raise SystemExit(INTERRUPTED) from None
            self.cancel()
            raise

    def watch(self, *, until: float = float("inf"), cancelled: bool = False) -> None:
        """Poll until all jobs are over or the monotonic clock reaches ``until``, at growing intervals."""
        began = time.monotonic()
        while self.jobs and (now := time.monotonic()) < until:
            for number, (state, reason) in self.queue.ask().items():
                if number in self.jobs:
                    self.show(number, state)
                    if state in OVER or state == NOT_IN_QUEUE:
                        finalize_job(self.jobs[number], state, reason, cancelled=cancelled)
                        del self.jobs[number]
            if self.jobs:
                time.sleep(min(max((now - began) / 10, 1.0), LAST_POLL_S))

    def show(self, number: str, state: str) -> None:
        if self.shown.get(number) != state:
            self.shown[number] = state
            print(f"job {self.jobs[number].sweep_job.number} (SLURM {number}): {state.lower()}", flush=True)

    def cancel(self) -> None:
        """Cancel the jobs, and wait up to PATIENCE_S seconds until those that run have saved their state."""
        print(f"jobs that are cancelled: {len(self.jobs)}", flush=True)
        subprocess.run(["scancel", *self.jobs], check=False)
        self.watch(until=time.monotonic() + PATIENCE_S, cancelled=True)


def is_ctrl_c(request: KeyboardInterrupt) -> bool:
    """Return whether SIGINT raised ``request``, and not a signal such as SIGHUP of a lost connection."""
    return str(request) == signal.SIGINT.name


def wants_cancel(count: int) -> bool:
    """Ask at the terminal whether to cancel ``count`` jobs; return the answer.

    It is True without a terminal, and after a second Ctrl-C. It is False after any other signal, and at the
    end of the input, which comes before the signal of a lost connection.
    """
    if not sys.stdin.isatty():
        return True
    try:
        answer = input(f"\njobs that are not over: {count}; cancel them? [y/N] ")
    except KeyboardInterrupt as request:
        return is_ctrl_c(request)
    except EOFError:
        return False
    return answer.strip().lower() in {"y", "yes"}


def finalize_job(job: SubmittedJob, state: str, reason: str, *, cancelled: bool) -> None:
    """Complete the outcome of a job that is over, and print its failure.

    Rank 0 writes the outcome, so it can be missing, or have the status ``completed`` although another rank
    failed.
    """
    known = read_final_record(job, expected=state == "COMPLETED")
    healthy = state in {"COMPLETED", NOT_IN_QUEUE}
    out_of_time = known.status == "interrupted" and stop_reason(known.folder) == "run.max_time"
    ended_well = healthy and (known.status == "completed" or out_of_time)
    if known.status in {"invalid", "pruned"} or ended_well:
        return
    if cancelled and known.status != "failed":
        job.sweep_job.write(replace(known, status="interrupted", error=known.error or "cancelled"))
        return
    ended = f"SLURM job {job.id}: {state}" + ("" if reason in {"", "None"} else f" ({reason})")
    error = describe_end(job, known, ended)
    job.sweep_job.write(replace(known, status="failed", error=error))
    where = job.logs / f"{job.id}_*"
    print(f"job {job.sweep_job.number} failed; {ended}; logs: {where}\n{error}", file=sys.stderr, flush=True)


def read_final_record(job: SubmittedJob, *, expected: bool) -> JobRecord:
    """Return the outcome that the job has written, or one with the status ``running`` if it never began.

    If the end of the job is ``expected`` in its file, wait up to WRITING_S seconds until it is visible.
    """
    deadline = time.monotonic() + (WRITING_S if expected else 0.0)
    while True:
        known = JobRecord(job.sweep_job.number, job.sweep_job.overrides, "running")
        if job.sweep_job.path.exists():
            known = read_job_record(job.sweep_job.path)
        if known.status != "running" or time.monotonic() >= deadline:
            return known
        time.sleep(1.0)


def describe_end(job: SubmittedJob, known: JobRecord, ended: str) -> str:
    """Return the failure of the rank that failed first, or else the end of the log and the job's state."""
    folder = None if known.folder is None else Path(known.folder)
    if folder is not None and read_failure_reports(folder):
        return f"TrainingError: {root_cause(folder, ())}"
    if known.status == "failed":
        return str(known.error)
    if known.status == "interrupted":
        resumed = f"checkpoint.resume={hydra_value(folder)}"
        onward = "nothing is saved" if folder is None else f"resume it with {shlex.quote(resumed)}"
        return f"{ended}\nit was stopped, and is not queued again; {onward}"
    return f"the end of {job.log}:{read_last_lines(job.log)}\n{ended}"
