"""Parallel jobs of a sweep on this machine, each in its own process."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from components.contracts.errors import DONE, INTERRUPTED
from components.rank_info import CORES, GPU_SHARERS, MEMORY_SHARERS, num_cores
from runner.records.failures import describe_exit, read_last_lines
from runner.records.job_record import SweepJob, read_job_record
from runner.signals import SignalHandler, handling

POLL_S = 0.1
GRACE_S = 5.0
"""Seconds that the jobs have to end after SIGTERM."""


@dataclass(frozen=True)
class LocalJob:
    sweep_job: SweepJob
    command: Sequence[str]
    given: bytes
    """Standard input of the process."""

    @property
    def log(self) -> Path:
        return self.sweep_job.path.with_suffix(".log")


@dataclass
class RunningJob:
    job: LocalJob
    process: "subprocess.Popen[bytes]"
    began: float = field(default_factory=time.monotonic)


def run_jobs(jobs: Sequence[LocalJob], at_once: int) -> None:
    """Run all ``jobs``, at most ``at_once`` at a time, and record the outcome of each job that has begun.

    The first signal is forwarded to the running jobs, which save and end, and no further job begins.

    Raises:
        SystemExit: after a signal. Its code is DONE, or INTERRUPTED if a job could not save its state.
        KeyboardInterrupt: after a second signal; no job is left running.
    """
    LocalJobPool(jobs, min(at_once, len(jobs))).run()


class LocalJobPool:
    """The waiting jobs of one launch, and its running jobs, each in a slot with its ``machine_share``."""

    def __init__(self, jobs: Sequence[LocalJob], places: int) -> None:
        self.waiting, self.running = deque(jobs), dict[int, RunningJob]()
        self.shares = [machine_share(place, places, visible_gpus()) for place in range(places)]
        self.request = SignalHandler(self.forward_signal)
        self.interrupted = False

    def run(self) -> None:
        try:
            with handling(self.request):
                while self.running or (self.waiting and not self.request.number):
                    self.fill()
                    time.sleep(POLL_S)
                    self.collect()
        finally:
            self.terminate()
        if self.request.number:
            if self.waiting:
                write_stderr(f"{len(self.waiting)} jobs have not begun.")
            raise SystemExit(INTERRUPTED if self.interrupted else DONE)

    def fill(self) -> None:
        for place, environ in enumerate(self.shares):
            if place not in self.running and self.waiting and not self.request.number:
                self.running[place] = start_job(self.waiting.popleft(), environ)
                if self.request.number:  # a signal arrived meanwhile
                    self.running[place].process.send_signal(self.request.number)

    def collect(self) -> None:
        """Remove the jobs that have ended from the running ones and report them."""
        for place, running in list(self.running.items()):
            if running.process.poll() is not None:
                del self.running[place]
                stopping = self.request.number > 0
                self.interrupted |= stopping and running.process.returncode != DONE
                close_job(running, stopping=stopping)

    def forward_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        write_stderr(
            f"{name}: no other job begins, and running jobs save and end; a second signal ends them now"
        )
        for running in self.running.values():
            running.process.send_signal(number)

    def terminate(self) -> None:
        """Send SIGTERM to all running jobs, and SIGKILL to those that still run after GRACE_S seconds."""
        with handling(lambda *_: None):
            processes = [running.process for running in self.running.values()]
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + GRACE_S
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
                if process.poll() is None:
                    process.kill()  # its ranks end with it
                    process.wait()
            for running in self.running.values():
                close_job(running, stopping=True)


def start_job(job: LocalJob, environ: dict[str, str]) -> RunningJob:
    """Start a job in a new session, so that Ctrl-C in a terminal reaches only this process."""
    job.sweep_job.mark_running()
    with tempfile.TemporaryFile() as given, job.log.open("wb") as log:
        given.write(job.given)
        given.seek(0)
        process = subprocess.Popen(
            job.command,
            env=os.environ | environ | {"RUNNER_PARENT": str(os.getpid())},
            stdin=given,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return RunningJob(job, process)


def close_job(running: RunningJob, *, stopping: bool) -> None:
    """Print the outcome of a job that has ended; record it first if the job itself could not.

    ``stopping`` means that the sweep was requested to stop.
    """
    job, code, seconds = running.job, running.process.returncode, time.monotonic() - running.began
    if read_job_record(job.sweep_job.path).status == "running":  # the job could not record its end
        error = f"the job {describe_exit(code)}; the end of {job.log}:{read_last_lines(job.log)}"
        job.sweep_job.finish(
            "interrupted" if stopping else "failed", error=None if stopping else error, seconds=seconds
        )
    record = read_job_record(job.sweep_job.path)
    loss = "" if record.loss is None else f", loss {record.loss:.4f}"
    write_stderr(
        f"job {record.number}: {record.status} after {seconds:.0f} s{loss}  {' '.join(record.overrides)}"
    )
    if record.error:
        write_stderr(f"{record.error}\nits log: {job.log}")


def write_stderr(words: str) -> None:
    """Write a line to stderr, unbuffered, because a signal may have interrupted a write to its buffer."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{words}\n".encode())


def machine_share(place: int, places: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that give slot ``place`` its part of the cores, GPUs and memory.

    If there are more slots than GPUs, several slots share a GPU. If the user has set ``OMP_NUM_THREADS``, it
    is kept, and the cores are not divided.
    """
    environ = {MEMORY_SHARERS: str(places)}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = str(max(num_cores() // places, 1))
        environ |= {CORES: cores, "OMP_NUM_THREADS": cores}
    if gpus:
        first, last = place * len(gpus) // places, (place + 1) * len(gpus) // places
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : max(last, first + 1)])
        sharers = sum(other * len(gpus) // places == first for other in range(places))
        environ |= {GPU_SHARERS: str(sharers)} if sharers > 1 else {}
    return environ


def visible_gpus() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.split(",") if gpu]
    import torch  # here, because most commands do not need it

    return [str(number) for number in range(torch.cuda.device_count())]
