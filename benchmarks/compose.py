"""An experiment composed from overrides, as the command line composes it."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir

from runner.cli import config_dir, resolved
from runner.config.sources import ConfigSources


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """``run.name`` has to be given: Hydra knows it on the real command line alone."""
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return resolved(compose("config", list(overrides)), ConfigSources())
