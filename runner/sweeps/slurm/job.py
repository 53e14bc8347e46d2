"""One job of a sweep on SLURM, whose config is composed by the sweep's process and which other nodes run."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from components.contracts.device import DeviceKind
from components.contracts.errors import DONE, FAILED, MISTAKE, ConfigError
from components.contracts.json_types import Config
from components.rank_info import RankInfo
from runner.cli import exit_code
from runner.command_mistakes import explained
from runner.config.sources import ConfigSources
from runner.launch import slurm_env
from runner.launch.default_env import set_default_env
from runner.launch.rank_main import exit_process
from runner.records.job_record import SWEEP_FOLDER, SweepJob, read_job_record
from runner.search_path import program_first
from runner.standard_streams import survive_closed_streams
from runner.sweeps.sweep import run_point

CODES = {"completed": DONE, "pruned": DONE, "interrupted": DONE, "invalid": MISTAKE}


@dataclass(frozen=True)
class SlurmJob:
    """A composed config without Hydra's state, as a callable that every task started by SLURM calls."""

    config: Config
    where: ConfigSources
    command: tuple[str, ...]
    """The command line of the sweep."""
    environ: Mapping[str, str]
    """The variables of ``hydra.job.env_set``."""

    @property
    def sweep_job(self) -> SweepJob:
        assert self.where.sweep_job is not None
        return self.where.sweep_job

    def check(self, tasks: int | None, gpus: int) -> None:
        """Check keys, batch sizes and whether model and layout fit, on the machine that starts the sweep.

        Args:
            tasks: number of tasks, each of which is a rank. None means one task that starts its own ranks.
            gpus: number of GPUs that a task sees.

        Raises:
            ConfigError: if a check fails that would also fail on the machine of the job.
        """
        from components.preflight import checks
        from runner.launch.checks import check_parts, checked_experiment
        from runner.training.assembly import engine_options

        experiment, _ = checked_experiment(self.config, self.where)
        run, layout = experiment.run, experiment.parallelism
        world_size = layout.world_size({} if tasks is None else {"WORLD_SIZE": str(tasks)}, gpus)
        ahead = experiment.preflight
        name, joined = ahead.device_name, tasks is not None
        checks.check_modes(ahead.mode, ahead.devices, name, run.device, joined=joined)
        checks.check_restarts(run.max_restarts, joined)
        model = check_parts(experiment)
        is_known = gpus or tasks is not None or run.device == "cpu" or getattr(layout, "dp", 1) is not None
        if ahead.mode != "check" or not is_known:  # the number of ranks is that of GPUs that are not known
            return
        checks.check_batch(run.global_batch_size, run.rows_per_microbatch, layout.dp_size(world_size))
        # Without gpus_per_node, other options of SLURM may ask for GPUs, so that the device is not known.
        either: tuple[DeviceKind, ...] = ("cuda",) if gpus else ("cpu", "cuda")
        mistakes = []
        for device in either if run.device == "auto" else (run.device,):
            options = engine_options(experiment, device, adapter=experiment.adapter)
            try:
                layout.check(model, experiment.optimizer, options, world_size=world_size)
            except ConfigError as mistake:
                mistakes.append(mistake)
            else:
                return
        raise mistakes[-1]

    def __call__(self) -> NoReturn:
        """Run one rank and exit without a teardown, which could wait for peers: see ``rank_main.main``."""
        program_first()
        survive_closed_streams()
        os.environ |= dict(self.environ)
        set_default_env()
        os.environ |= slurm_env.ranks(os.environ)
        os.environ[SWEEP_FOLDER] = str(self.sweep_job.sweep)
        first = RankInfo.read().rank == 0
        exit_process(exit_code(self.run_and_record if first else self.run))

    def run(self) -> float:
        began = time.time()
        from runner.launch.run import run

        return run(self.config, self.where, self.command, began)

    def run_and_record(self) -> None:
        """Run the job and record its outcome; only rank 0 calls it.

        Raises:
            SystemExit: with the exit code of the outcome.
        """
        run_point(self.sweep_job, self.run, explained)
        raise SystemExit(CODES.get(read_job_record(self.sweep_job.path).status, FAILED))
