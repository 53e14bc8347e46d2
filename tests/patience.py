"""Time limits for tests, scaled by how fast this machine is at the moment."""

import time
from functools import cache

WORK = 300_000
WORK_S = 0.02
"""Duration of the loop in `_slowness` in seconds, on an idle core of a server of 2023."""
GENEROUS = 4.0


@cache
def _slowness() -> float:
    """Seconds of wall time of a fixed piece of work by those on an idle core; at least 1."""
    began = time.perf_counter()
    total = 0
    for number in range(WORK):
        total += number
    return max((time.perf_counter() - began) / WORK_S, 1.0)


def patience(seconds: float) -> float:
    """A limit in seconds for what takes less than ``seconds`` on an idle machine: a guard against hangs.

    It grows with what a fixed piece of work takes in this process, so that other processes on the machine
    do not fail a test.
    """
    return GENEROUS * seconds * _slowness()
