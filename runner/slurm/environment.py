"""What SLURM tells a process of its job, and what a run asks of SLURM: to be queued again.

Nothing here needs more than the variables of the environment and, for the latter, ``scontrol``.
"""

import re
import subprocess
import sys
from collections.abc import Mapping

from runner.errors import ConfigError
from runner.json_types import Json

MAX_REQUEUES = "RUNNER_MAX_REQUEUES"
"""In the environment of a job that is one run: how often it may ask to be queued again."""

FIRST_PORT, PORTS = 10_000, 20_000
"""Below the ports that Linux hands out by itself."""
NOTICES = ("SIGUSR1", "SIGUSR2")
"""What a job script has SLURM send (``--signal``) before a job's time is up."""
REASONS = (*NOTICES, "SIGTERM")
"""For which a run that has saved its state is queued again: SLURM preempts with SIGTERM."""


def ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's place in its run, in torchrun's variables; {}: none was given by SLURM.

    A task of ``srun`` is a rank where the step has several. Batch scripts, shells of ``salloc`` and lone
    tasks start the ranks themselves, as on any machine; what torchrun says counts more. Ranks meet at the
    first node of the step, at a port that follows from job and step: array tasks that share a node differ.
    What the environment says of MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS stays.
    """
    size = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if size == "1" or "RANK" in environ:
        return {}
    node, job, step = (int(environ[f"SLURM_{name}"]) for name in ("NODEID", "JOB_ID", "STEP_ID"))
    defaults = {
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(FIRST_PORT + (31 * job + step) % PORTS),
        "OMP_NUM_THREADS": environ.get("SLURM_CPUS_PER_TASK", "1"),
    }
    return {name: environ.get(name, value) for name, value in defaults.items()} | {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "GROUP_RANK": str(node),
    }


def first_host(nodes: str) -> str:
    """``gpu[03-05,9],login`` -> ``gpu03``"""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """``4(x2),1`` -> [4, 4, 1]"""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def job_facts(environ: Mapping[str, str]) -> Json | None:
    """Of the SLURM job around this process: its id as ``squeue`` shows it, and how often it was restarted."""
    if "SLURM_JOB_ID" not in environ:
        return None
    name = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in environ:
        name = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return {"job": name, "restarts": int(environ.get("SLURM_RESTART_COUNT", "0"))}


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
    job, allowed = job_facts(environ), max_requeues(environ)
    if job is None or not allowed:
        return False
    if environ.get("RANK", "0") != "0":
        return True
    if job["restarts"] >= allowed:
        print(f"not queued again: it was {job['restarts']} times already ({MAX_REQUEUES}={allowed})")
        return False
    shown = scontrol("show", "job", "--oneliner", job["job"])  # the bare number of a job may mean its array
    if not shown.returncode and "JobState=RUNNING" not in shown.stdout:
        return False  # cancelled, or SLURM queues it again by itself
    answer = shown if shown.returncode else scontrol("requeue", job["job"])
    if answer.returncode:
        print(f"not queued again: scontrol: {answer.stderr.strip()}", file=sys.stderr)
        return False
    print(f"queued again as job {job['job']} ({job['restarts'] + 1} of {allowed} times)", flush=True)
    return True


def scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    """Where there is no ``scontrol``, as in most containers, or no answer, that is its failure."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
