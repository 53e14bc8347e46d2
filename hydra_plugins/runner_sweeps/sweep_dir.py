"""Creation of the folder of a sweep, by a callback of Hydra."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, read_write
from omegaconf.errors import OmegaConfBaseException

from components.contracts.errors import ConfigError
from hydra_plugins.runner_sweeps.search_space import as_overrides
from runner.launch.slurm_env import MAX_REQUEUES
from runner.records.job_record import SWEEP_FOLDER
from runner.sweeps.sweep import create_sweep
from runner.training.pruner import leave_no_pruner


class SweepFolder(Callback):
    """A callback that creates the sweep folder and passes it to all jobs in the environment."""

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        from components.rank_info import RankInfo
        from runner.command_mistakes import explained

        try:
            if RankInfo.read().launched:
                raise ConfigError(
                    "-m, sweep=, or hydra.mode in a file: a sweep cannot run under torchrun or srun; leave "
                    "it out, or add hydra.mode=RUN without -m (the runner starts its own ranks, or SLURM's: "
                    "hydra/launcher=slurm)."
                )
            folder = make_folder(config)
        except Exception as mistake:  # Hydra would only warn of it
            raise SystemExit(explained(mistake)) from mistake
        os.environ[SWEEP_FOLDER] = str(folder)
        os.environ.pop(MAX_REQUEUES, None)  # it marks a SLURM job that is one run; this job is a sweep


def make_folder(config: DictConfig) -> Path:
    """Create the folder of a sweep and return its absolute path.

    Raises:
        ConfigError: if the folder cannot be created, a swept key has no value, or
            ``hydra.sweeper.study_name`` is not a valid folder name.
    """
    from components.home import expand_home
    from components.json_text import one_line
    from runner.cli import as_given

    study = config.hydra.sweeper.get("study_name")
    if config.run.output_dir == "":  # the folder of the sweep would be /sweeps
        raise ConfigError("run.output_dir: is empty; name a folder, such as outputs.")
    try:
        folder = Path(expand_home("hydra.sweep.dir", config.hydra.sweep.dir)).absolute()
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"hydra.sweep.dir: is not known when a sweep starts ({one_line(error)}); use only keys such as "
            "${run.output_dir}."
        ) from error
    with read_write(config), read_write(config.hydra):  # Hydra's sweeper would not expand ~
        config.hydra.sweep.dir = str(folder)
    if study is not None and not re.fullmatch(r"[\w+-][\w.+-]*", str(study)):
        raise ConfigError(
            f"hydra.sweeper.study_name: {study!r} is not a folder name; use letters, digits, '_', '+', "
            "'-' and '.', but no leading '.'."
        )
    check_swept_values([*as_given(config.hydra), *as_overrides(config.hydra.sweeper.get("params"))])
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        if study is None:  # Optuna's sweeper does this itself, while it holds the lock of the folder
            create_sweep(folder, as_given(config.hydra))
            leave_no_pruner(folder)
    except OSError as error:
        raise ConfigError(
            f"hydra.sweep.dir: cannot make {folder}: {error.strerror}; name another one, or another "
            "run.output_dir, which it is in by default."
        ) from error
    return folder


def check_swept_values(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override is malformed or a swept key has no value, because no job would run."""
    from components.json_text import one_line

    # The loader lists the files of a glob. ``parse_override``, for one word, would not pass it on.
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    for words in overrides:
        try:
            (override,) = parser.parse_overrides([words])
            discrete = override.is_sweep_override() and override.is_discrete_sweep()
            empty = discrete and next(override.sweep_string_iterator(), None) is None
            reason = "has no value; give at least one value" if empty else None
        except (ValueError, HydraException) as error:
            reason = f"{one_line(error)}; correct it"
        if reason is not None:
            raise ConfigError(f"{words}: {reason}.")
