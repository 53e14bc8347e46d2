"""Print the matmul rate of a thread as JSON: ``OMP_NUM_THREADS=1 python -m benchmarks.baselines.matmul``."""

import json
import time
from collections.abc import Callable

import torch

SIZES = (256, 512, 1024, 2048)
TRIALS = 7
ENOUGH_S = 0.1
"""Seconds of a product above which no larger size is tried: bf16 may be 50 times slower than fp32."""


def flops_per_cpu_second(dtype: torch.dtype) -> float:
    """Return the highest rate of several products of square matrices; other processes can only lower it."""
    rate = 0.0
    for size in SIZES:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        best = min(cpu_seconds(lambda a=a, b=b: a @ b) for _ in range(TRIALS))
        rate = max(rate, 2 * size**3 / best)
        if best > ENOUGH_S:
            break
    return rate


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    rates = {"fp32": flops_per_cpu_second(torch.float32), "bf16": flops_per_cpu_second(torch.bfloat16)}
    print(json.dumps(rates))
