"""Composing an experiment from overrides as the command line does."""

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir

from runner.cli import resolved
from runner.conf_folder import config_dir
from runner.config.sources import ConfigSources


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the resolved config for ``overrides``, as the command line composes it.

    The overrides must set ``run.name``, whose default can be resolved only on the command line.
    """
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return resolved(compose("config", list(overrides)), ConfigSources())
