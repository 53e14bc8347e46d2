"""The folder of a sweep."""

import os
from pathlib import Path

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from components.contracts.errors import ConfigError
from runner.launch.slurm_env import MAX_REQUEUES
from runner.sweeps.job_record import SWEEP_FOLDER
from runner.sweeps.sweep import create_sweep


class SweepFolder(Callback):
    """A callback that creates the sweep folder and passes it to all jobs in the environment."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        from runner.cli import as_given, explained

        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            create_sweep(folder, as_given(config.hydra))
        except OSError as error:
            mistake = ConfigError(
                f"run.output_dir: cannot make {folder}: {error.strerror}; name another folder."
            )
            raise SystemExit(explained(mistake)) from error  # Hydra swallows all other errors of a callback
        os.environ[SWEEP_FOLDER] = str(folder)
        os.environ.pop(MAX_REQUEUES, None)  # it marks a SLURM job that is one run; this job is a sweep
