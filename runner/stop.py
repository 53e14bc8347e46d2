"""Ending a run before its last step: signals, and the end of its time.

Nothing here imports torch: the command line uses it from its first moment.
"""

import math
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from runner.errors import ConfigError

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Of which the second ends a run at once."""

PRUNED = "pruned"
"""The reason of a run that is not worth going on with, as a sweep's optimiser finds."""

TIME_IS_UP = 1000.0
"""Above every signal's number, so that ranks agree on a reason by its maximum."""
RECENT = 20
"""Steps whose longest the next may take: the first of all, which compiles, is soon forgotten."""
MARGIN, EXIT_S = 1.5, 2.0
"""Steps and saves may take this much longer than any so far; leaving takes seconds too."""


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


Pruner = Callable[[int, float], bool]


class StopRequest:
    """What signals have asked for: the first one asks for a stop, and the run goes on to a step's end.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt, but not with ``patient``: a rank with a parent is
    ended by its parent, and may be told twice, by the parent and by a batch system.
    """

    def __init__(self, heard: Callable[[int], object], *, patient: bool = False) -> None:
        self.number, self.heard, self.patient = 0, heard, patient

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        if number in IMPATIENT and self.number in IMPATIENT:
            if not self.patient:
                interrupt(number, frame)
        elif not self.number or number in IMPATIENT:
            self.number = number
            self.heard(number)


class Stop:
    """Whether the run is to end at this boundary, agreed over all ranks.

    Args:
        agree: the largest of the values that the ranks pass; collective.
        requested: this rank's signals.
        deadline: when the run must have ended, by ``clock``.
        save_s: what the first save is expected to take.
        prune: told the step and the loss of an evaluation, whether the run is to go no further.
    """

    def __init__(
        self,
        agree: Callable[[float], float],
        requested: StopRequest,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.time,
        save_s: float = 0.0,
        prune: Pruner | None = None,
    ) -> None:
        self.agree, self.requested, self.deadline, self.clock = agree, requested, deadline, clock
        self.prune = prune
        self.reason: str | None = None
        """SIGTERM, ..., run.max_time, or pruned; the same on every rank."""
        self.latest = deque[float](maxlen=RECENT)
        self.longest_save, self.since = save_s, clock()

    def agreed(self) -> str | None:
        """The reason, if any rank has one; every rank calls it after every step and batch."""
        now = self.clock()
        self.latest.append(now - self.since)
        self.since, longest = now, max(self.latest)
        needed = MARGIN * (longest + max(self.longest_save, longest)) + EXIT_S
        late = TIME_IS_UP if self.deadline - now < needed else 0.0
        code = self.agree(max(late, float(self.requested.number)))
        if code and self.reason is None:
            self.reason = "run.max_time" if code == TIME_IS_UP else signal.Signals(int(code)).name
        return self.reason

    def evaluated(self, step: int, loss: float) -> None:
        """Asks ``prune`` where a rank has one; every rank calls it after every evaluation but the last."""
        pruned = self.prune is not None and self.prune(step, loss)
        if self.agree(float(pruned)):
            self.reason = PRUNED

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, which is no part of a step."""
        began = self.clock()
        yield
        self.since = self.clock()
        self.allow_for(self.since - began)

    def allow_for(self, save_s: float) -> None:
        """A save has taken, or may take, so many seconds."""
        self.longest_save = max(self.longest_save, save_s)


def seconds(value: float | str) -> float:
    """Of ``run.max_time``: seconds, ``HH:MM:SS``, or ``3h30m``.

    Raises:
        ConfigError: it is none of these, or not above 0.
    """
    text = str(value)
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    if found := clock or units:
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        total = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        total = float(text) if re.fullmatch(r"\d+(\.\d*)?", text) else 0.0
    if total <= 0:
        raise ConfigError(f"run.max_time: {text!r} is no time; give seconds, HH:MM:SS, or 3h30m.")
    return total
