"""``hydra/launcher=slurm``: the jobs of a sweep as one SLURM job array, watched until all are over."""

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from components.contracts.errors import MISTAKE, ConfigError
from hydra_plugins.runner_sweeps.local import returned
from runner.config.sources import ConfigSources
from runner.distribution import pip_install
from runner.records.job_record import SWEEP_FOLDER, SweepJob

if TYPE_CHECKING:
    from runner.sweeps.slurm.job import SlurmJob
    from runner.sweeps.slurm.sbatch import SbatchOptions


class SlurmLauncher(Launcher):
    """A launcher that composes and checks every job before submission; refused jobs are not submitted."""

    def __init__(self, **options: object) -> None:
        self.options = options

    def setup(  # Hydra's signature
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002
        config: DictConfig,
    ) -> None:
        self.context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their losses, which are NaN for jobs without one.

        A failed job does not raise an error here; the error is in its job record.

        Raises:
            ConfigError: if an option of the launcher is wrong, or SLURM does not accept the jobs.
            SystemExit: if a job of a dry run is refused.
        """
        setup_globals()
        sweep, allocation = Path(os.environ[SWEEP_FOLDER]), self.allocation()
        configs = [self.compose(words, initial_job_idx + i) for i, words in enumerate(job_overrides)]
        jobs = [job for config in configs if (job := accepted(config, allocation)) is not None]
        if allocation.dry_run:
            from runner.sweeps.slurm.dry_run import print_dry_run

            print_dry_run(allocation, sweep / "slurm", jobs)
            if len(jobs) < len(configs):
                raise SystemExit(MISTAKE)
        elif jobs:
            submit(allocation, sweep / "slurm", jobs)
        return [returned(SweepJob(sweep, config.hydra.job.num, ())) for config in configs]

    def allocation(self) -> "SbatchOptions":
        """Build the allocation from the options.

        Raises:
            ConfigError: if a key of ``hydra.launcher`` is wrong, or submitit is not installed.
        """
        from runner.config.instantiate import construct
        from runner.sweeps.slurm.sbatch import SbatchOptions

        try:
            import submitit  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"hydra/launcher=slurm: submits through submitit; {pip_install('slurm')}."
            ) from error
        options: Any = OmegaConf.to_container(OmegaConf.create(self.options), resolve=True)
        where = ConfigSources(overrides=tuple(sys.argv[1:]))
        return construct(SbatchOptions, "hydra.launcher", options, where)

    def compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        return config


def accepted(config: DictConfig, allocation: "SbatchOptions") -> "SlurmJob | None":
    """Build and check the job of one composed config.

    None means that the job is refused; its job record then has the error, except in a dry run.
    """
    from runner.cli import provenance, resolved
    from runner.command_mistakes import explained
    from runner.sweeps.slurm.job import SlurmJob

    with current(config):
        where = provenance()
        try:
            plain, environ = resolved(without_hydra(config), where), dict(config.hydra.job.env_set)
            job = SlurmJob(plain, where, tuple(sys.argv), environ)
            job.check(allocation.ranks, allocation.gpus_per_node or 0)
        except (ConfigError, OmegaConfBaseException) as error:
            explained(error)
            assert where.sweep_job is not None
            if not allocation.dry_run:  # whose number may be that of a real job in the folder of a study
                where.sweep_job.mark_running()
                where.sweep_job.finish("invalid", error=str(error), seconds=0.0)
            return None
    return job


def submit(allocation: "SbatchOptions", folder: Path, jobs: Sequence["SlurmJob"]) -> None:
    """Submit ``jobs`` and return when all are over."""
    from runner.sweeps.slurm.job_array import JobArray, SubmittedJob

    numbers = allocation.submit(folder, jobs)
    submitted = [
        SubmittedJob(number, job.sweep_job, folder) for number, job in zip(numbers, jobs, strict=True)
    ]
    print(f"jobs submitted: {len(jobs)}; scripts and logs: {folder}", flush=True)
    JobArray(submitted).wait()


@contextmanager
def current(config: DictConfig) -> Iterator[None]:
    """Resolve ``${hydra:...}`` from ``config`` while the context is open."""
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(config)
    try:
        yield
    finally:
        instance.cfg = before


def without_hydra(config: DictConfig) -> DictConfig:
    task = copy.deepcopy(config)
    with open_dict(task):
        del task["hydra"]
    return task
