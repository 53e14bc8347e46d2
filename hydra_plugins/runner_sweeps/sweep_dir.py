"""The folder of a sweep."""

import os
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
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
            check_values([*as_given(config.hydra), *swept_parameters(config)])
            create_sweep(folder, as_given(config.hydra))
        except OSError as error:
            mistake = ConfigError(
                f"run.output_dir: cannot make {folder}: {error.strerror}; name another folder."
            )
            raise SystemExit(explained(mistake)) from error  # Hydra swallows all other errors of a callback
        except ConfigError as mistake:
            raise SystemExit(explained(mistake)) from mistake
        os.environ[SWEEP_FOLDER] = str(folder)
        os.environ.pop(MAX_REQUEUES, None)  # it marks a SLURM job that is one run; this job is a sweep


def swept_parameters(config: DictConfig) -> list[str]:
    """Return ``hydra.sweeper.params``, which a sweep file sets, as overrides."""
    return [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]


def check_values(overrides: Sequence[str]) -> None:
    """Raise ConfigError if a swept key has no value, because no job would run."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if not (override.is_sweep_override() and override.is_discrete_sweep()):
            continue
        try:
            reason = "has no value" if next(override.sweep_string_iterator(), None) is None else None
        except ValueError as error:
            reason = str(error)
        if reason is not None:
            raise ConfigError(f"{override.input_line} (the command line): {reason}; give at least one value.")
