"""Rank and rendezvous of a process, from the environment variables of torchrun or SLURM.

No other module reads these variables. This one does not import torch, because the command line imports it at
startup.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from components.contracts.errors import ConfigError

CORES = "RUNNER_CORES"
"""Environment variable of a job: the number of cores that all its ranks together may use."""
GPU_SHARERS = "RUNNER_GPU_SHARERS"
"""Environment variable of a job: the number of concurrent jobs that share its GPU."""
MEMORY_SHARERS = "RUNNER_MEMORY_SHARERS"
"""Environment variable of a job: the number of concurrent jobs that share the memory of the machine."""
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
PORT = range(1, 2**16)
FIRST_PORT, PORTS = 10_000, 20_000
"""First port and number of ports for the rendezvous of SLURM tasks, below the ephemeral range of Linux."""


@dataclass(frozen=True)
class RankInfo:
    """Rank and rendezvous of one process. The defaults describe a process that was not launched as a rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank within the node."""
    local_world_size: int = 1
    """Number of ranks on the node."""
    node: int = 0
    """Index of the node, torchrun's GROUP_RANK."""
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    """Port at which the ranks meet, with the same default as torch."""
    launched: bool = False
    """Whether torchrun, srun or a parent process has launched this process as a rank."""
    restarts: int = 0
    """Number of times that torchrun has started the ranks again after a failure."""

    @property
    def attempt(self) -> str:
        """Prefix of the keys of this start in torchrun's store, which keeps the keys of earlier starts.

        A start after a change of the number of nodes has the same number of restarts.
        """
        return f"{self.restarts}_of_{self.world_size}"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read torchrun's variables from ``environ``. None means the environment of this process.

        Raises:
            ConfigError: if a variable is not a number in its range.
        """
        environ = os.environ if environ is None else environ
        world_size = env_number(environ, "WORLD_SIZE", cls.world_size, range(1, 10**6))
        ranks = range(world_size if "WORLD_SIZE" in environ else 10**6)  # check_place names what is missing
        return cls(
            rank=env_number(environ, "RANK", cls.rank, ranks),
            world_size=world_size,
            local_rank=env_number(environ, "LOCAL_RANK", cls.local_rank, ranks),
            local_world_size=env_number(environ, "LOCAL_WORLD_SIZE", world_size, range(1, world_size + 1)),
            node=env_number(environ, "GROUP_RANK", cls.node, ranks),
            master_addr=environ.get("MASTER_ADDR", cls.master_addr),
            master_port=env_number(environ, "MASTER_PORT", cls.master_port, PORT),
            launched=any(name in environ for name in PLACE),
            restarts=env_number(environ, "TORCHELASTIC_RESTART_COUNT", cls.restarts, range(10**6)),
        )

    @classmethod
    def from_slurm(cls, environ: Mapping[str, str]) -> Self | None:
        """Read SLURM's variables from ``environ``. None means that SLURM has not launched a rank.

        A task of ``srun`` is a rank if its step has several tasks and torchrun's RANK is not set. Batch
        scripts, ``salloc`` shells and single tasks start the ranks themselves, as on any machine. The
        rendezvous is on the first node of the step, at a port derived from the ids of job and step, so that
        array tasks on one node use different ports. MASTER_ADDR and MASTER_PORT take precedence if they are
        set.

        Raises:
            ConfigError: if a variable of a rank is missing or not a number in its range, or if
                SLURM_STEP_TASKS_PER_NODE has no entry for this node.
        """
        size = env_number(environ, "SLURM_STEP_NUM_TASKS", 1, range(1, 10**6))
        if size == 1 or "RANK" in environ:
            return None
        node, job, step, rank, local_rank = (
            env_number(environ, f"SLURM_{name}", None, allowed)
            for name, allowed in (
                ("NODEID", range(10**6)),
                ("JOB_ID", range(2**32)),
                ("STEP_ID", range(2**32)),
                ("PROCID", range(size)),
                ("LOCALID", range(size)),
            )
        )
        counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        if node >= len(counts):
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE: has {len(counts)} node(s) in the environment, and this is node "
                f"{node}; start the ranks with srun."
            )
        chosen = FIRST_PORT + (31 * job + step) % PORTS
        return cls(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=counts[node],
            node=node,
            master_addr=environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "")),
            master_port=env_number(environ, "MASTER_PORT", chosen, PORT)
            if environ.get("MASTER_PORT")
            else chosen,
            launched=True,
        )

    def variables(self) -> dict[str, str]:
        """Return the environment variables from which ``read`` makes this object."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def env_number(environ: Mapping[str, str], name: str, default: int | None, allowed: range) -> int:
    """Return the environment variable ``name`` as a number, or ``default`` if it is not set.

    Raises:
        ConfigError: if it is not a number in ``allowed``, or is not set and has no default.
    """
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name}: is not set in the environment of this srun task; start it with srun.")
        return default
    if not text.isdecimal() or int(text) not in allowed:
        raise ConfigError(
            f"{name}: is {text!r} in the environment; set it to a number from {allowed[0]} to {allowed[-1]}, "
            "or unset it."
        )
    return int(text)


def num_cores() -> int:
    """Return the number of cores that this process and its children may use together.

    A job of a sweep may use a part of the cores (``CORES``). Otherwise these are the cores in the CPU
    affinity, which taskset, SLURM or the cpuset of a container has set, or all cores if the system does not
    support CPU affinity.
    """
    if CORES in os.environ:
        return int(os.environ[CORES])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_place(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher has set only some of ``PLACE``, or lacks LOCAL_WORLD_SIZE.

    LOCAL_WORLD_SIZE may be missing on a single machine, and nothing shows that it is the first of several.
    """
    known = [name for name in PLACE if name in environ]
    if known and len(known) < len(PLACE):
        missing = ", ".join(sorted(set(PLACE) - set(known)))
        raise ConfigError(
            f"{known[0]}: is set in the environment, but {missing} is not; set all or unset it."
        )
    if known and "LOCAL_WORLD_SIZE" not in environ and environ["LOCAL_RANK"] != environ["RANK"]:
        raise ConfigError(
            "LOCAL_WORLD_SIZE: is not set, and these ranks are on several machines; let the launcher set it "
            "to the number of ranks on each machine, and GROUP_RANK to the number of the machine, from 0."
        )


def first_host(nodes: str) -> str:
    """Return the first name of a node list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).split(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """Expand SLURM's list of tasks per node: ``4(x2),1`` -> [4, 4, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
