"""``hydra/launcher=local``: concurrent jobs of a sweep on this machine."""

import math
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict

from components.contracts.errors import ConfigError
from hydra_plugins.runner_sweeps.local_job import COMMAND
from runner.records.job_record import SWEEP_FOLDER, SweepJob, read_job_record
from runner.sweeps.local_jobs import LocalJob, run_jobs


class LocalLauncher(Launcher):
    """A launcher that composes all jobs before the first begins.

    Later edits of config files have no effect.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, config: DictConfig, **_: object) -> None:
        """Check the options and keep Hydra's config and loader.

        Raises:
            ConfigError: if ``hydra.launcher.jobs`` is not an integer of at least 1.
        """
        if not isinstance(self.jobs, int) or self.jobs < 1:
            raise ConfigError(f"hydra.launcher.jobs: must be at least 1, got {self.jobs!r}.")
        self.config, self.loader = config, hydra_context.config_loader

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        setup_globals()
        jobs = [self.job(n, overrides) for n, overrides in enumerate(job_overrides, initial_job_idx)]
        run_jobs(jobs, self.jobs)
        return [returned(job.sweep_job) for job in jobs]

    def job(self, number: int, overrides: Sequence[str]) -> LocalJob:
        from runner.cli import as_given

        config = self.loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        point = SweepJob(Path(os.environ[SWEEP_FOLDER]), number, as_given(config.hydra))
        return LocalJob(point, COMMAND, pickle.dumps((sys.argv, config)))


def returned(point: SweepJob) -> JobReturn:
    """Return the job as completed, whatever its outcome; Hydra would show only the first failure."""
    loss = read_job_record(point.path).loss
    answer = JobReturn(overrides=point.overrides, status=JobStatus.COMPLETED)
    answer.return_value = math.nan if loss is None else loss
    return answer
