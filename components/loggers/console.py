"""Terminal output: lines, tables and the progress bar."""

from collections.abc import Mapping
from dataclasses import dataclass

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from components.loggers.base import RunInfo


@dataclass(frozen=True)
class Console:
    """The lines of train.log and a progress bar on the terminal. It takes no rows of metrics."""

    progress: bool = True

    def check(self) -> None:
        """Do nothing: there are no requirements."""

    def open(self, start: RunInfo) -> None:
        """Return None, because the terminal takes no rows of metrics."""


class Terminal(rich.console.Console):
    """The terminal, as standard error. Without a ``Console`` it is ``quiet``: only warnings are shown."""

    def __init__(self, shown: Console | None) -> None:
        super().__init__(stderr=True, quiet=shown is None)
        self.has_bar = shown is not None and shown.progress

    def progress_bar(self) -> Progress | None:
        columns = (
            *(TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=30)),
            *(TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left")),
        )
        return Progress(*columns, console=self, transient=True) if self.has_bar else None


def terminal(loggers: Mapping[str, object]) -> Terminal:
    """Return the terminal for the first ``Console`` among ``loggers``, or a quiet one."""
    return Terminal(next((spec for spec in loggers.values() if isinstance(spec, Console)), None))
