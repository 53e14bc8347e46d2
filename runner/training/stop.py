"""Whether a run is to end before its last step: on a signal, at the end of its time, or by a pruner.

Nothing here imports torch: the command line uses it from its first moment.
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.launch.signals import SignalHandler

PRUNED = "pruned"
"""The reason of a run that is not worth going on with, as a sweep's optimiser finds."""

TIME_LIMIT = 1000.0
"""Above every signal's number, so that ranks agree on a reason by its maximum."""
RECENT = 20
"""Steps whose longest the next may take: the first of all, which compiles, is soon forgotten."""
MARGIN, EXIT_S = 1.5, 2.0
"""Steps and saves may take this much longer than any so far; leaving takes seconds too."""

Pruner = Callable[[int, float], bool]


class StopPolicy:
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
        requested: SignalHandler,
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

    def poll(self) -> str | None:
        """The reason, if any rank has one; every rank calls it after every step and batch."""
        now = self.clock()
        self.latest.append(now - self.since)
        self.since, longest = now, max(self.latest)
        needed = MARGIN * (longest + max(self.longest_save, longest)) + EXIT_S
        late = TIME_LIMIT if self.deadline - now < needed else 0.0
        code = self.agree(max(late, float(self.requested.number)))
        if code and self.reason is None:
            self.reason = "run.max_time" if code == TIME_LIMIT else signal.Signals(int(code)).name
        return self.reason

    def check_prune(self, step: int, loss: float) -> None:
        """Asks ``prune`` where a rank has one; every rank calls it after every evaluation but the last."""
        pruned = self.prune is not None and self.prune(step, loss)
        if self.agree(float(pruned)):
            self.reason = PRUNED

    @contextmanager
    def expects_save(self) -> Iterator[None]:
        """Around a save, which is no part of a step."""
        began = self.clock()
        yield
        self.since = self.clock()
        self.expect_save(self.since - began)

    def expect_save(self, save_s: float) -> None:
        """A save has taken, or may take, so many seconds."""
        self.longest_save = max(self.longest_save, save_s)
