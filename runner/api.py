"""The program as a library, for scripts and notebooks."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from components.contracts.errors import ConfigError
from components.contracts.status import RunStatus
from runner.cli import as_command, compose_command
from runner.commands.import_config import hydra_value
from runner.config.command_line import is_sweep
from runner.launch.cuda_env import set_cuda_defaults


@dataclass(frozen=True)
class TrainResult:
    """What a run has left."""

    folder: Path
    status: RunStatus
    """``completed``, or ``interrupted`` if a signal or ``run.max_time`` stopped it."""
    metrics: Mapping[str, float]
    """The last logged value of every metric; ``step`` is that of the last training row."""
    checkpoint: Path | None
    """The newest checkpoint."""
    export: Path | None
    """The Hugging Face folder, or that of the adapter."""


def train(experiment: Sequence[str] | Mapping[str, object] = ()) -> TrainResult:
    """Run one experiment as ``python -m runner`` does, and return what it has left.

    One rank runs in this process, which must be its main thread; several are started as processes. A script
    calls this below ``if __name__ == "__main__":``, because it is imported by processes that tokenise.

    Args:
        experiment: words of the command line, or keys and their values, also one mapping for each group.

    Raises:
        ConfigError: if the config is wrong, before any rank starts.
        TrainingError: if a rank failed.
    """
    words = as_words(experiment) if isinstance(experiment, Mapping) else list(experiment)
    set_cuda_defaults()
    folders: list[Path] = []
    with as_command(words) as command:
        if is_sweep(command):
            raise ConfigError("runner.api.train: starts one run; leave out the sweep, and call it in a loop.")
        config, where = compose_command()
        if config["preflight"]["mode"] != "check":
            raise ConfigError("preflight.mode: runner.api.train trains; leave it out.")
        from runner.launch.final_report import newest_checkpoint  # imports torch
        from runner.launch.run import run
        from runner.launch.run_record import RunRecord

        with suppress(SystemExit):  # a signal has stopped the run, as its record says
            run(config, where, command, time.time(), folders.append)
    record, export = RunRecord.read(folders[0]), folders[0] / "export"
    assert record.ended is not None
    return TrainResult(
        folder=folders[0],
        status=record.ended,
        metrics=record.results.last,
        checkpoint=newest_checkpoint(folders[0], record),
        export=export if export.is_dir() else None,
    )


def as_words(keys: Mapping[str, object]) -> list[str]:
    """Return ``keys``, or groups of keys, as words of the command line."""
    words = []
    for name, node in keys.items():
        inner = {f"{name}.{key}": value for key, value in node.items()} if isinstance(node, Mapping) else None
        words += [f"{key}={hydra_value(value)}" for key, value in (inner or {name: node}).items()]
    return words
