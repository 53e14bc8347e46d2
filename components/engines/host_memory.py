"""How a process on the CPU asks the system for memory."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """Makes glibc's malloc reuse large blocks instead of returning each of them to the system at once.

    A returned block is mapped and zeroed again page by page at its next use, which costs as much as the
    arithmetic on a large activation. What a step has freed is kept for the next one, and for later runs of
    this process; where lengths vary much, holes that fit nothing may add to the peak.

    Returns False where the C library has no such switch (musl, macOS); nothing else changes there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))
