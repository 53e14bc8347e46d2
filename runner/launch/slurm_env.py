"""What SLURM tells a process of its job, and what a run asks of SLURM: to be queued again.

Nothing here needs more than the variables of the environment and, for the latter, ``scontrol``.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from components.contracts.errors import ConfigError
from components.rank_info import RankInfo

MAX_REQUEUES = "RUNNER_MAX_REQUEUES"
"""In the environment of a job that is one run: how often it may ask to be queued again."""

NOTICES = ("SIGUSR1", "SIGUSR2")
"""What a job script has SLURM send (``--signal``) before a job's time is up."""
REASONS = (*NOTICES, "SIGTERM")
"""For which a run that has saved its state is queued again: SLURM preempts with SIGTERM."""


def ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's place in its run, in torchrun's variables; {}: none was given by SLURM.

    What the environment says of MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS stays.
    """
    place = RankInfo.from_slurm(environ)
    if place is None:
        return {}
    threads = environ.get("OMP_NUM_THREADS", environ.get("SLURM_CPUS_PER_TASK", "1"))
    return place.variables() | {"OMP_NUM_THREADS": threads}


@dataclass(frozen=True)
class JobFacts:
    """A SLURM job, as the run in it records it."""

    job: str
    """Id, as ``squeue`` shows it."""
    restarts: int
    """How often SLURM has started it again."""


def job_facts(environ: Mapping[str, str]) -> JobFacts | None:
    """Return the SLURM job around this process. None means that there is none."""
    if "SLURM_JOB_ID" not in environ:
        return None
    name = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in environ:
        name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return JobFacts(name, restarts=int(environ.get("SLURM_RESTART_COUNT", "0")))


def max_requeues(environ: Mapping[str, str]) -> int:
    """
    Raises:
        ConfigError: RUNNER_MAX_REQUEUES is no number.
    """
    asked = environ.get(MAX_REQUEUES, "0")
    if not asked.isdigit():
        raise ConfigError(f"{MAX_REQUEUES}: is {asked!r} in the environment; use a number, 0: never.")
    return int(asked)


def queue_again(environ: Mapping[str, str]) -> bool:
    """Asks SLURM to start this job once more, where the job says how often, and whether it will.

    Rank 0 asks, and the other ranks leave it to that one.
    """
    job, allowed, place = job_facts(environ), max_requeues(environ), RankInfo.read(environ)
    if job is None or not allowed:
        return False
    if place.rank != 0:
        return True
    if job.restarts >= allowed:
        print(f"not queued again: it was {job.restarts} times already ({MAX_REQUEUES}={allowed})")
        return False
    shown = scontrol("show", "job", "--oneliner", job.job)  # the bare number of a job may mean its array
    if not shown.returncode and "JobState=RUNNING" not in shown.stdout:
        return False  # cancelled, or SLURM queues it again by itself
    answer = shown if shown.returncode else scontrol("requeue", job.job)
    if answer.returncode:
        print(f"not queued again: scontrol: {answer.stderr.strip()}", file=sys.stderr)
        return False
    print(f"queued again as job {job.job} ({job.restarts + 1} of {allowed} times)", flush=True)
    return True


def scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    """Where there is no ``scontrol``, as in most containers, or no answer, that is its failure."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
