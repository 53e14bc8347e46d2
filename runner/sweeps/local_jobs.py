"""Concurrent jobs of a sweep on this machine, each in its own process."""

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
from runner.launch.failures import how_it_ended, last_lines
from runner.launch.signals import StopRequest, handling
from runner.sweeps.job_record import Point, read_outcome

CORES = "RUNNER_CORES"
"""Environment variable of a job: number of cores for all its ranks together."""

POLL_S = 0.1
GRACE_S = 5.0
"""Seconds for jobs to end their ranks after a second signal."""


@dataclass(frozen=True)
class Job:
    point: Point
    command: Sequence[str]
    given: bytes
    """The bytes that it reads from its standard input."""

    @property
    def log(self) -> Path:
        return self.point.path.with_suffix(".log")


@dataclass
class Running:
    job: Job
    process: "subprocess.Popen[bytes]"
    began: float = field(default_factory=time.monotonic)


def run_jobs(jobs: Sequence[Job], at_once: int) -> None:
    """Run all of ``jobs``, at most ``at_once`` at a time; each job that has begun leaves an outcome.

    The first signal is passed on to the running jobs, which save and end, and no other job begins.

    Raises:
        SystemExit: if a signal came; with code DONE, or INTERRUPTED if a job did not exit with DONE.
        KeyboardInterrupt: if a signal came twice; no job is left running.
    """
    SideBySide(jobs, min(at_once, len(jobs))).run()


class SideBySide:
    """The waiting and the running jobs of one launch; ``running`` is keyed by the job's slot."""

    def __init__(self, jobs: Sequence[Job], places: int) -> None:
        self.waiting, self.running = deque(jobs), dict[int, Running]()
        self.shares = [share(place, places, visible_gpus()) for place in range(places)]
        self.request = StopRequest(self.pass_on)
        self.interrupted = False

    def run(self) -> None:
        try:
            with handling(self.request):
                while self.running or (self.waiting and not self.request.number):
                    self.fill()
                    time.sleep(POLL_S)
                    self.collect()
        finally:
            self.end()
        if self.request.number:
            if self.waiting:
                tell(f"{len(self.waiting)} jobs have not begun.")
            raise SystemExit(INTERRUPTED if self.interrupted else DONE)

    def fill(self) -> None:
        for place, environ in enumerate(self.shares):
            if place not in self.running and self.waiting and not self.request.number:
                self.running[place] = start(self.waiting.popleft(), environ)
                if self.request.number:  # a signal came during the start
                    self.running[place].process.send_signal(self.request.number)

    def collect(self) -> None:
        """Remove the jobs that have ended, and complete their outcomes."""
        for place, running in list(self.running.items()):
            if running.process.poll() is not None:
                del self.running[place]
                stopping = self.request.number > 0
                self.interrupted |= stopping and running.process.returncode != DONE
                close(running, stopping=stopping)

    def pass_on(self, number: int) -> None:
        name = signal.Signals(number).name
        tell(f"{name}: no other job begins, and those that run save and end; once more: at once")
        for running in self.running.values():
            running.process.send_signal(number)

    def end(self) -> None:
        """End the jobs that still run: SIGTERM, and SIGKILL after GRACE_S seconds."""
        with handling(lambda *_: None):
            processes = [running.process for running in self.running.values()]
            for process in processes:
                process.terminate()
            deadline = time.monotonic() + GRACE_S
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0))
                if process.poll() is None:
                    process.kill()  # its ranks go with it
                    process.wait()
            for running in self.running.values():
                close(running, stopping=True)


def start(job: Job, environ: dict[str, str]) -> Running:
    """Start a job in a new session, so that Ctrl-C at a terminal reaches only this process."""
    job.point.began()
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
    return Running(job, process)


def close(running: Running, *, stopping: bool) -> None:
    """Complete the outcome of an ended job and print it."""
    job, code, seconds = running.job, running.process.returncode, time.monotonic() - running.began
    if read_outcome(job.point.path).status == "running":  # the job could not record its end itself
        error = f"the job {how_it_ended(code)}; the end of {job.log}:{last_lines(job.log)}"
        job.point.ended(
            "stopped" if stopping else "failed", error=None if stopping else error, seconds=seconds
        )
    outcome = read_outcome(job.point.path)
    loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
    tell(f"job {outcome.number}: {outcome.status} after {seconds:.0f} s{loss}  {' '.join(outcome.overrides)}")
    if outcome.error:
        tell(f"{outcome.error}\nits log: {job.log}")


def tell(words: str) -> None:
    """Print unbuffered on stderr: a signal handler may have interrupted a write to the buffers."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{words}\n".encode())


def share(place: int, places: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of the job in slot ``place``: its share of this machine's cores and GPUs.

    If there are more jobs than GPUs, several jobs share one. A user's ``OMP_NUM_THREADS`` is kept.
    """
    environ: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = str(max((os.cpu_count() or 1) // places, 1))
        environ |= {CORES: cores, "OMP_NUM_THREADS": cores}
    if gpus:
        first, last = place * len(gpus) // places, (place + 1) * len(gpus) // places
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : max(last, first + 1)])
    return environ


def visible_gpus() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu for gpu in listed.split(",") if gpu]
    import torch  # imported here, because most commands do not need it

    return [str(number) for number in range(torch.cuda.device_count())]
