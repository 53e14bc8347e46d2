"""The signals that ask a run to end, and how a process answers them.

Nothing here imports torch: the command line uses it from its first moment.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FORCE_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Of which the second ends a run at once."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Every request goes to ``handler``, even where the shell had it ignored; for the main thread."""
    before = {number: signal.signal(number, handler) for number in REQUESTS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def announce(number: int) -> None:
    """From a signal handler, so without the buffers that it may have interrupted."""
    name = signal.Signals(number).name
    os.write(2, f"{name}: the run ends when what it is doing is whole; once more: at once\n".encode())


class SignalHandler:
    """What signals have asked for: the first one asks for a stop, and the run goes on to a step's end.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt, but not with ``patient``: a rank with a parent is
    ended by its parent, and may be told twice, by the parent and by a batch system.
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
