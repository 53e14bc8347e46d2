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
    """Makes the folder of the sweep known to its jobs, wherever they run."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        from runner.cli import as_given, explained

        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            create_sweep(folder, as_given(config.hydra))
        except OSError as error:
            mistake = ConfigError(
                f"run.output_dir: cannot make {folder}: {error.strerror}; name another folder."
            )
            raise SystemExit(explained(mistake)) from error  # Hydra swallows whatever else a callback raises
        os.environ[SWEEP_FOLDER] = str(folder)
        os.environ.pop(MAX_REQUEUES, None)  # it says that a SLURM job is one run, which this one is not
