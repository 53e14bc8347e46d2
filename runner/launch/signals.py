"""The signals that request a run to stop, and their handlers.

Nothing here imports torch, because the command line needs it at once.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FORCE_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run at once when they come a second time."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Send every stop signal to ``handler`` while the context is open; only the main thread may open it.

    This includes signals that the shell set to be ignored, except SIGHUP, which ``nohup`` ignores on purpose.
    """
    wanted = [n for n in REQUESTS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def announce(number: int) -> None:
    """Print the request without a buffer, in which the signal may have interrupted another write."""
    name = signal.Signals(number).name
    os.write(2, f"{name}: the run ends at the next safe point; a second one ends it now\n".encode())


class SignalHandler:
    """A handler that records stop signals: after the first, the run continues to the end of its step.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt, except with ``ignore_second``: a rank with a parent
    is ended by its parent, and may get a signal twice, from the parent and from a batch system.
    """

    def __init__(self, on_signal: Callable[[int], object], *, ignore_second: bool = False) -> None:
        self.number, self.on_signal, self.ignore_second = 0, on_signal, ignore_second

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if number in FORCE_QUIT_SIGNALS and self.number in FORCE_QUIT_SIGNALS:
            if not self.ignore_second:
                interrupt(number, frame)
        elif not self.number or number in FORCE_QUIT_SIGNALS:
            self.number = number
            self.on_signal(number)
