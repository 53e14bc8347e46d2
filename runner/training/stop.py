"""Interruption of a run before its last step: by a signal, ``run.max_time``, or the pruner of a sweep.

Hooks, such as early stopping, can also end a run; see ``components.contracts.hook``. This module does not
import torch, because the command line imports it at startup.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable

from runner.signals import SignalHandler

PRUNED = "pruned"
"""Stop reason of a run that the pruner of a sweep has ended because it was not promising."""

TIME_LIMIT = 1000.0
"""Code of ``run.max_time`` among the stop reasons, whose other codes are the signal numbers.

The maximum over all ranks is used, and the time limit is above all signal numbers.
"""
RECENT = 20
"""Number of recent steps, and of recent evaluation batches, from which the next duration is estimated.

The estimate is the longest of their durations. The first step, which includes compilation, soon drops out.
"""
MARGIN, EXIT_S = 1.5, 2.0
"""Safety factor on the longest recent step and the longest save, and seconds that the exit takes."""

Pruner = Callable[[int, float], bool]


class StopPolicy:
    """The decision, the same on all ranks, whether the run ends before its last step.

    Args:
        agree: returns the maximum of a value over all ranks; collective.
        requested: the stop signals of this rank.
        deadline: time of ``clock`` at which the run must have ended.
        save_s: estimated seconds of a save, until one has been measured.
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
        self.longest_save, self.estimated_save, self.since = 0.0, save_s, clock()

    def poll(self, *, evaluates: bool = False) -> str | None:
        """Return the reason to stop. None means that no rank has one.

        Every rank calls this method after every step and, with ``evaluates``, after every batch of an
        evaluation.
        """
        now = self.clock()
        (self.eval_batches if evaluates else self.steps).append(now - self.since)
        self.since, longest = now, max(*self.steps, *self.eval_batches)
        save = max(self.longest_save, self.estimated_save)
        needed = MARGIN * (longest + max(save, longest)) + EXIT_S
        late = TIME_LIMIT if self.deadline - now < needed else 0.0
        code = self.agree(max(late, float(self.requested.number)))
        if code and self.reason is None:
            self.reason = "run.max_time" if code == TIME_LIMIT else signal.Signals(int(code)).name
        return self.reason

    def check_prune(self, step: int, loss: float) -> None:
        """Set the reason to stop if ``prune`` returns True on any rank.

        Every rank calls this method after each evaluation before the last step.
        """
        pruned = self.prune is not None and self.prune(step, loss)
        if self.agree(float(pruned)):
            self.reason = PRUNED

    def record_save(self, save_s: float, *, is_whole: bool = True) -> None:
        """Record the duration of a save that has just ended, and do not count it as part of a step.

        Unless it ``is_whole``, because it failed, was written before or is written in the background, the
        estimate is kept.
        """
        self.since, self.longest_save = self.clock(), max(self.longest_save, save_s)
        if is_whole:
            self.expect_save(save_s)

    def expect_save(self, save_s: float) -> None:
        """Expect saves to take ``save_s`` seconds, if that is the longest; 0 means that none was measured."""
        if save_s:
            self.longest_save, self.estimated_save = max(self.longest_save, save_s), 0.0
