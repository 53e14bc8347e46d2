"""The terminal: lines, tables and the progress bar, or next to nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from components.loggers.base import RunInfo


@dataclass(frozen=True)
class Console:
    """Shows a run on the terminal. Its lines are those of train.log, so it takes no rows."""

    progress: bool = True

    def check(self) -> None:
        """Nothing can be missing."""

    def open(self, start: RunInfo) -> None:
        """No rows."""


class Terminal(rich.console.Console):
    """Standard error; ``quiet`` where no ``Console`` was chosen: it then shows warnings and no more."""

    def __init__(self, shown: Console | None) -> None:
        super().__init__(stderr=True, quiet=shown is None)
        self.has_bar = shown is not None and shown.progress

    def progress_bar(self) -> Progress | None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, console=self, transient=True) if self.has_bar else None


def terminal(loggers: Mapping[str, object]) -> Terminal:
    """As the chosen ``loggers`` want it."""
    return Terminal(next((spec for spec in loggers.values() if isinstance(spec, Console)), None))
