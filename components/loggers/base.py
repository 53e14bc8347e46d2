"""The interface of loggers. A row is ``{"step": 10, "train/loss": 2.3, ...}``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.contracts.status import RunStatus

Row = Mapping[str, float | int | None]
"""Metric -> value. None means that the metric has no value at this step. ``step`` is always present."""


@dataclass(frozen=True)
class RunInfo:
    """Information for a logger at the start of a run, also of a resumed one."""

    folder: Path
    """The run folder, with config.yaml, run.json, audit.json and the other files written before step 1."""
    config: Config
    facts: Config = field(default_factory=dict)
    """Content of run.json."""
    step: int = 0
    """Number of completed steps. Rows of later steps from an earlier start of this run are obsolete."""


@dataclass(frozen=True)
class RunResult:
    status: RunStatus
    summary: Row = field(default_factory=dict)
    """The last value of each metric, and the step of the last training row with a loss."""
    reason: str | None = None


class Logger(Protocol):
    """A logger, which only the main rank opens. After an exception in it, the run continues without it."""

    def log(self, row: Row) -> None: ...

    def log_table(self, name: str, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """Log a table of texts, such as completions, with one column for each key."""

    def finish(self, ending: RunResult) -> None:
        """Flush all rows to disk or to the server before returning.

        This method is called once, however the run ends.
        """


class LoggerSpec(Protocol):
    """One node of the ``logger`` group."""

    def check(self) -> None:
        """Raise ConfigError if a requirement is missing; called before any rank starts."""

    def open(self, start: RunInfo) -> Logger | None:
        """Return the logger. None means that it takes no rows."""


def require(package: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"logger={package}: the package is not installed; pip install {package}.")
