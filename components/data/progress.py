"""Progress of the work on data: a line on a terminal, or a line of the log every ten seconds."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

EVERY_S = 10.0
"""Seconds between two lines of the log."""


@contextmanager
def show_progress(
    label: str, unit: str, fraction: Callable[[], float | None] = lambda: None
) -> Iterator[Callable[[int], None]]:
    """Show progress while the context is open.

    The context yields a function to call with the number of units just done. ``fraction`` returns the share
    of the whole work that is done. None means not known.
    """
    console = Console(stderr=True)
    terminal = console.is_terminal and sys.stdout.isatty()
    lines = ProgressLines(label, unit, fraction)
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)

        def advance(number: int) -> None:
            progress.advance(task, number)
            if not terminal:
                lines.advance(number)

        yield advance


class ProgressLines:
    """A log of progress: a line every ``EVERY_S`` seconds, with the speed and the time left."""

    def __init__(self, label: str, unit: str, fraction: Callable[[], float | None]) -> None:
        self._label, self._unit, self._fraction = label, unit, fraction
        self._done, self._before = 0, fraction() or 0.0
        self._began = self._last = time.monotonic()

    def advance(self, number: int) -> None:
        self._done += number
        now = time.monotonic()
        if now - self._last < EVERY_S:
            return
        self._last, spent = now, now - self._began
        left, share = "", self._fraction()
        if share is not None and share > self._before:
            left = f", {timedelta(seconds=round((1 - share) / (share - self._before) * spent))} left"
        speed = self._done / spent
        log.info("%s: %s %s, %s/s%s", self._label, f"{self._done:,}", self._unit, f"{speed:,.0f}", left)
