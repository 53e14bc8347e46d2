"""Rounding of products that are numbers of steps."""

import math


def whole_steps(steps: float) -> int:
    """Round a number of steps up, to at least 1, ignoring floating-point error.

    For example, 50 * 1.1 (55.00000000000001) gives 55, not 56.
    """
    return max(math.ceil(round(steps, 6)), 1)
