"""Stops of a run before its last step: by a signal, ``run.max_time``, or a pruner.

This module does not import torch, because the command line imports it at its start.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.launch.signals import SignalHandler

PRUNED = "pruned"
"""The reason if the pruner of a sweep's optimiser ends a run that is not promising."""

TIME_LIMIT = 1000.0
"""Code of the time limit among stop reasons. It is above all signal numbers, and ranks use the maximum."""
RECENT = 20
"""Number of recent steps, and of recent batches of an evaluation. The next one is expected not to exceed the
longest of them. The first step, which compiles, soon drops out."""
MARGIN, EXIT_S = 1.5, 2.0
"""Safety factor on the longest step and save so far, and seconds that the exit takes."""

Pruner = Callable[[int, float], bool]


class StopPolicy:
    """The decision, the same on all ranks, whether the run ends before its last step.

    Args:
        agree: returns the maximum of a value over all ranks; collective.
        requested: the stop signals of this rank.
        deadline: time of ``clock`` at which the run must have ended.
        save_s: estimated seconds of the first save.
        prune: returns whether to end the run, given the step and the loss of an evaluation.
    """

    def __init__(
        self,
        agree: Callable[[float], float],
        requested: SignalHandler,
        deadline: float = math.inf,
        clock: Callable[[], float] = time.time,
        save_s: float = 0.0,
        prune: Pruner | None = None,
    ) -> None:
        self.agree, self.requested, self.deadline, self.clock = agree, requested, deadline, clock
        self.prune = prune
        self.reason: str | None = None
        """Name of a signal, ``run.max_time`` or ``pruned``; the same on every rank."""
        self.steps, self.eval_batches = deque[float]([0.0], RECENT), deque[float]([0.0], RECENT)
        self.longest_save, self.since = save_s, clock()

    def poll(self, *, evaluates: bool = False) -> str | None:
        """Return the reason to stop, if any rank has one; every rank calls it at the same points.

        It is called after every step and, with ``evaluates``, after every batch of an evaluation.
        """
        now = self.clock()
        (self.eval_batches if evaluates else self.steps).append(now - self.since)
        self.since, longest = now, max(*self.steps, *self.eval_batches)
        needed = MARGIN * (longest + max(self.longest_save, longest)) + EXIT_S
        late = TIME_LIMIT if self.deadline - now < needed else 0.0
        code = self.agree(max(late, float(self.requested.number)))
        if code and self.reason is None:
            self.reason = "run.max_time" if code == TIME_LIMIT else signal.Signals(int(code)).name
        return self.reason

    def check_prune(self, step: int, loss: float) -> None:
        """End the run if ``prune`` of any rank returns true.

        Every rank calls it after each evaluation except the last.
        """
        pruned = self.prune is not None and self.prune(step, loss)
        if self.agree(float(pruned)):
            self.reason = PRUNED

    @contextmanager
    def expects_save(self) -> Iterator[None]:
        """Time a save, and do not count it as part of a step."""
        began = self.clock()
        yield
        self.since = self.clock()
        self.expect_save(self.since - began)

    def expect_save(self, save_s: float) -> None:
        """Raise the expected duration of a save to ``save_s`` seconds, if that is longer."""
        self.longest_save = max(self.longest_save, save_s)
