"""The SLURM resources of the jobs of a sweep, and the job script."""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.contracts.errors import ConfigError, check_at_least_one, check_at_least_zero
from components.contracts.json_types import Json
from runner.launch.slurm_env import MAX_REQUEUES

if TYPE_CHECKING:
    from runner.sweeps.slurm.job import SlurmJob


PYTHON = (sys.executable, "-P")
"""Interpreter of the jobs; with -P the working directory does not hide packages of this program."""

KEYS = {
    "job-name": "name",
    "ntasks-per-node": "tasks_per_node",
    "mem": "mem_gb",
    "time": "timeout_min",
    "signal": "signal_delay_s",
    "array": "array_parallelism",
    "requeue": "max_requeues",
    "no-requeue": "max_requeues",
    **{key: key for key in ("nodes", "account", "partition", "qos", "constraint")},
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_task",
}
"""Option of sbatch -> the key that sets it."""


@dataclass(frozen=True)
class SbatchOptions:
    """``hydra.launcher`` of ``hydra/launcher=slurm``; conf/hydra/launcher/slurm.yaml describes every key."""

    name: str
    nodes: int
    tasks_per_node: int
    gpus_per_node: int | None
    cpus_per_task: int | None
    mem_gb: float | None
    timeout_min: int
    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    signal_delay_s: int
    max_requeues: int
    array_parallelism: int
    setup: tuple[str, ...]
    srun_args: tuple[str, ...]
    sbatch_args: tuple[str, ...]
    dry_run: bool

    def __post_init__(self) -> None:
        keys = ("nodes", "tasks_per_node", "cpus_per_task", "timeout_min", "array_parallelism")
        check_at_least_one("hydra.launcher", self, *keys)
        others = ("gpus_per_node", "mem_gb", "signal_delay_s", "max_requeues")
        check_at_least_zero("hydra.launcher", self, *others)
        for word in self.sbatch_args:
            if not re.fullmatch("--[a-z].*", word):
                raise ConfigError(
                    f"hydra.launcher.sbatch_args: {word!r} is not a long option; use --NAME=VALUE."
                )
            same = KEYS.get(re.split("[= ]", word.removeprefix("--"))[0])
            if same is not None and getattr(self, same) is not None:  # None is not in the script
                raise ConfigError(
                    f"hydra.launcher.sbatch_args: {word} repeats hydra.launcher.{same}; set that key."
                )
        if self.signal_delay_s >= 60 * self.timeout_min:
            raise ConfigError(
                f"hydra.launcher.signal_delay_s: {self.signal_delay_s} s before the time limit of "
                f"{self.timeout_min} min is before the job begins; lower it, or raise "
                "hydra.launcher.timeout_min."
            )
        if self.ranks is not None and self.gpus_per_node not in (None, 0, self.tasks_per_node):
            raise ConfigError(
                f"hydra.launcher.tasks_per_node: each of the {self.ranks} tasks is one rank on one GPU, so "
                f"{self.tasks_per_node} on a node does not suit hydra.launcher.gpus_per_node="
                f"{self.gpus_per_node}; set both to the same number."
            )

    @property
    def ranks(self) -> int | None:
        """Number of ranks of every job. None means a single task, which starts the ranks of its layout."""
        tasks = self.nodes * self.tasks_per_node
        return None if tasks == 1 else tasks

    def parameters(self) -> Json:
        """Return submitit's parameters of the job script; names are those of sbatch."""
        return {
            "job_name": self.name,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks_per_node,
            "gpus_per_node": self.gpus_per_node,
            "cpus_per_task": self.cpus_per_task,
            "mem": None if self.mem_gb is None else f"{round(self.mem_gb * 1024)}M",
            "time": self.timeout_min,
            "account": self.account,
            "partition": self.partition,
            "qos": self.qos,
            "constraint": self.constraint,
            "signal_delay_s": self.signal_delay_s,
            "array_parallelism": self.array_parallelism,
            "setup": self.exports() + list(self.setup),
            "srun_args": list(self.srun_args),
            "stderr_to_stdout": True,
            "wckey": None,
            "additional_parameters": self.options(),
        }

    def options(self) -> dict[str, str | bool]:
        """Return the sbatch options that submitit has no parameter for; True marks one without a value."""
        words = ["--requeue" if self.max_requeues else "--no-requeue", *self.sbatch_args]
        pairs = (word.removeprefix("--").partition("=") for word in words)
        return {name: value if equals else True for name, equals, value in pairs}

    def exports(self) -> list[str]:
        """Return the bash lines that export the variables of every job."""
        lines = [
            "export SLURM_KILL_BAD_EXIT=1  # a task that fails ends the others",
            f"export {MAX_REQUEUES}={self.max_requeues}",
        ]
        if self.cpus_per_task is not None:  # without it, srun requests one CPU per task
            lines.append(f"export SRUN_CPUS_PER_TASK={self.cpus_per_task}")
        return lines

    def script(self, folder: Path, count: int) -> str:
        """Return the script that ``submit`` submits for ``count`` jobs; SLURM need not be installed."""
        from submitit.slurm.slurm import _make_sbatch_string

        command = shlex.join([*PYTHON, "-u", "-m", "submitit.core._submit", str(folder)])
        size = count if count > 1 else None
        return _make_sbatch_string(command=command, folder=folder, map_count=size, **self.parameters())

    def submit(self, folder: Path, jobs: Sequence["SlurmJob"]) -> list[str]:
        """Submit one array with scripts and logs in ``folder``; return the id of every job.

        Raises:
            ConfigError: if SLURM is not installed, or sbatch refuses.
        """
        from submitit import SlurmExecutor
        from submitit.core.utils import FailedJobError

        try:
            executor = SlurmExecutor(folder=folder, python=shlex.join(PYTHON))
        except RuntimeError as error:
            raise ConfigError(
                "hydra/launcher=slurm: srun is not installed here; start the sweep on a machine with SLURM, "
                "or look at its script with hydra.launcher.dry_run=true."
            ) from error
        executor.update_parameters(**self.parameters())
        try:
            return [job.job_id for job in executor.submit_array(jobs)]
        except (FailedJobError, subprocess.CalledProcessError) as error:
            said = re.findall(r"(?:sbatch: )?error: (.*)", str(error)) or [str(error)]
            raise ConfigError(
                f"hydra.launcher: sbatch refuses: {'; '.join(said)}. Correct the key that it names "
                "(hydra.launcher.dry_run=true shows the script)."
            ) from error
