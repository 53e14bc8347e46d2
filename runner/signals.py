"""The signals that request a run to stop, their handlers, and the signal that follows the end of a parent.

The import of this module does not import torch, which would delay the start of the command line.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
FORCE_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run at once if one of them has already been received."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl``."""


def die_with_parent() -> None:
    """Make the kernel (Linux) send SIGKILL to this process when its parent ends for any reason.

    Raises:
        SystemExit: if the parent has ended already. It is known unless the parent is torchrun.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get("RUNNER_PARENT", os.getppid())):
        sys.exit("the parent ended before this rank began")


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle every stop signal by ``handler`` while the context is open; only the main thread may open it.

    This includes signals that the shell set to be ignored, except SIGHUP, which ``nohup`` sets to be ignored.
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
    """Print which signal requested a stop.

    The write is unbuffered, because the signal may have interrupted a write to the buffer of stderr.
    """
    name = signal.Signals(number).name
    os.write(2, f"{name}: the run ends at the next safe point; a second one ends it now\n".encode())


class SignalHandler:
    """A handler that records stop signals: after the first, the run continues to the end of its step.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt, unless ``ignore_second`` is set. It is set for a rank
    that a launcher started. The launcher ends such a rank itself, and the rank may get one signal twice, from
    the launcher and from SLURM.
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
