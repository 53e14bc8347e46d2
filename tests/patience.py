"""Time limits for tests, scaled by the present speed of this machine."""

import time
from functools import cache

WORK = 300_000
WORK_S = 0.02
"""Duration of the loop in `_slowness` in seconds, on an idle core of a server of 2023."""
GENEROUS = 4.0


@cache
def _slowness() -> float:
    """Return the wall time of a fixed loop as a multiple of its time on an idle core, at least 1."""
    began = time.perf_counter()
    total = 0
    for number in range(WORK):
        total += number
    return max((time.perf_counter() - began) / WORK_S, 1.0)


def patience(seconds: float) -> float:
    """Return a time limit in seconds for work that takes less than ``seconds`` on an idle machine.

    The limit guards against hangs. It grows with the time of a fixed loop in this process, so that a test
    does not fail because of other processes on the machine.
    """
    return GENEROUS * seconds * _slowness()
