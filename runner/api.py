"""Training from Python, for scripts and notebooks: ``python -m runner`` as a function."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.contracts.errors import ConfigError
from components.contracts.status import RunStatus
from components.rank_info import RankInfo
from runner.cli import application, as_override, execute, in_sweep
from runner.command_mistakes import as_mistake
from runner.config.command_line import hydra_value, is_sweep
from runner.config.unknown_keys import check_long_options
from runner.launch.default_env import set_default_env
from runner.records.run_dir import read_run_config
from runner.records.run_record import RunRecord


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    status: RunStatus
    """``completed``, or ``interrupted`` if a signal or ``run.max_time`` stopped the run."""
    metrics: Mapping[str, float]
    """The last logged value of every metric."""
    export: Path | None
    """The folder of the exported model, in the Hugging Face format. None means that none was written."""


def train(experiment: Sequence[str] | Mapping[str, object] = ()) -> TrainResult:
    """Run one experiment as ``python -m runner`` does.

    Only the main thread may call this function. A single rank runs in this process, unless
    ``run.max_restarts`` is above 0. Otherwise ranks are started as processes of their own.

    Args:
        experiment: words of the command line, or values of keys: ``{"stage": "pt", "run.max_steps": 5}``.

    Raises:
        ConfigError: if the config is wrong, before any rank starts, or if ``experiment`` is not a single
            training run, such as a sweep or a forecast, or if torchrun or srun started this process as one of
            several.
        TrainingError: if a rank failed that is a process of its own.
    """
    place = RankInfo.from_slurm(os.environ) or RankInfo.read()
    if place.world_size > 1:
        raise ConfigError(
            f"runner.api.train: this process is one of {place.world_size} of torchrun or srun; call it in a "
            "single process, which starts the ranks, or let the launcher start python -m runner."
        )
    folders: list[Path] = []
    keys = experiment.items() if isinstance(experiment, Mapping) else ()
    words = [f"{key}={hydra_value(value)}" for key, value in keys] or [*experiment]
    before, sys.argv = sys.argv, ["runner", *map(as_override, words)]
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra would print errors and exit
    set_default_env()
    try:
        check_long_options(words)
        with suppress(SystemExit):  # a signal has stopped the run, as its record says
            if not is_sweep(sys.argv):
                application(lambda config: None if in_sweep() else execute(config, folders.append))()
    except Exception as error:  # noqa: BLE001  raised again
        mistake = as_mistake(error)
        raise mistake from (None if mistake is error else error)
    finally:
        sys.argv = before
    if not folders:
        raise ConfigError(f"runner.api.train: {' '.join(words)} is not one run to train; leave out the rest.")
    record, export = RunRecord.read(folders[0]), folders[0] / "export"
    assert record.ended is not None
    exports = record.ended == "completed" and read_run_config(folders[0])["run"].get("export")
    written = export if exports and export.is_dir() else None
    return TrainResult(folders[0], record.ended, record.results.last, written)
