"""The SLURM job of this process: its description from the environment, and its requeueing.

Only requeueing calls a command of SLURM, ``scontrol``.
"""

import subprocess
import sys
from collections.abc import Mapping

from components.contracts.errors import ConfigError
from components.rank_info import RankInfo, env_number
from runner.records.run_record import JobFacts

MAX_REQUEUES = "RUNNER_MAX_REQUEUES"
"""Environment variable of a SLURM job that is one run: the number of times that it may be requeued."""

NOTICES = ("SIGUSR1", "SIGUSR2")
"""Signals that SLURM sends before a job's time limit (``--signal`` in the job script)."""
REASONS = (*NOTICES, "SIGTERM")
"""Signals after which a run that has saved its state is requeued. SLURM preempts with SIGTERM."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that only ranks of torchrun have."""
FORWARDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
"""Environment variable that torchrun sets for its ranks: the signals that it forwards to them."""


def ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set for this process, or {} if SLURM started no ranks.

    MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS keep their values if the environment has them.

    Raises:
        ConfigError: if a variable of SLURM is missing, or is not a number in its range.
    """
    place = RankInfo.from_slurm(environ)
    if place is None:
        return {}
    threads = environ.get("OMP_NUM_THREADS", environ.get("SLURM_CPUS_PER_TASK", "1"))
    return place.variables() | {"OMP_NUM_THREADS": threads}


def job_facts(environ: Mapping[str, str]) -> JobFacts | None:
    """Return the SLURM job of this process. None means that there is none.

    Raises:
        ConfigError: if SLURM_RESTART_COUNT is not a number in its range.
    """
    if "SLURM_JOB_ID" not in environ:
        return None
    name = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in environ:
        name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return JobFacts(name, restarts=env_number(environ, "SLURM_RESTART_COUNT", 0, range(10**6)))


def max_requeues(environ: Mapping[str, str]) -> int:
    """Return how often this job may be requeued; 0 means never.

    Raises:
        ConfigError: if RUNNER_MAX_REQUEUES is not a number.
    """
    return env_number(environ, MAX_REQUEUES, 0, range(2**31))


def check_forwarding(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this job may be requeued and torchrun does not forward ``NOTICES`` to ranks."""
    forwarded = environ.get(FORWARDED, "").replace(" ", "").split(",")
    if TORCHRUN in environ and max_requeues(environ) and not {*NOTICES} <= {*forwarded}:
        raise ConfigError(
            f"{MAX_REQUEUES}: is set, but torchrun ends at {' and '.join(NOTICES)} before a checkpoint is "
            "saved; add torchrun --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2."
        )


def queue_again(environ: Mapping[str, str]) -> bool:
    """Requeue this SLURM job if RUNNER_MAX_REQUEUES allows it; return whether SLURM will restart it.

    Only rank 0 requeues. On the other ranks the result is True if requeueing is enabled.

    Raises:
        ConfigError: if RUNNER_MAX_REQUEUES is not a number.
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
        return False  # cancelled, or SLURM requeues it by itself
    answer = shown if shown.returncode else scontrol("requeue", job.job)
    if answer.returncode:
        print(f"not queued again: scontrol: {answer.stderr.strip()}", file=sys.stderr)
        return False
    print(f"queued again as job {job.job} ({job.restarts + 1} of {allowed} times)", flush=True)
    return True


def scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run ``scontrol``; return a result with exit code 1 if it takes more than 60 s or is not installed.

    It is not installed in most containers.
    """
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
