"""What a logger is. A row is ``{"step": 10, "train/loss": 2.3, ...}``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config

Row = Mapping[str, float | int | None]
"""None: asked for, but there is no value. ``step`` is always there."""


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told of the run, or of the part of a resumed run, that begins."""

    folder: Path
    """Of the run, with config.yaml, run.json, audit.json and what else was known before its first step."""
    config: Config
    facts: Config = field(default_factory=dict)
    """run.json"""
    step: int = 0
    """Steps done before. What an earlier start of this run has logged of later ones does not count."""


@dataclass(frozen=True)
class RunResult:
    status: Literal["done", "stopped", "failed"]
    """``stopped``: by a signal or ``run.max_time``; it can go on."""
    summary: Row = field(default_factory=dict)
    """The last value of everything that was logged, and the step of the last training row with a loss."""
    reason: str | None = None


class Logger(Protocol):
    """Lives on the main rank alone. What it raises costs the run nothing but this logger."""

    def log(self, row: Row) -> None: ...

    def finish(self, ending: RunResult) -> None:
        """Everything logged is on disk (or sent) when this returns; called once, however the run ends."""


class LoggerSpec(Protocol):
    """One node of the ``logger`` group."""

    def check(self) -> None:
        """Raises ConfigError where something is missing; called before any rank starts."""

    def open(self, start: RunInfo) -> Logger | None:
        """None: it takes no rows."""


def require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"logger={package}: the package is not installed; pip install {package}.")
