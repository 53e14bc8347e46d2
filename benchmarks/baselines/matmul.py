"""Print the matmul rate of a thread as JSON: ``OMP_NUM_THREADS=1 python -m benchmarks.baselines.matmul``."""

import json
import time

import torch

SIZE = 2048
TRIALS = 7


def flops_per_cpu_second(dtype: torch.dtype) -> float:
    """Return the best rate of several products of square matrices, as other processes only slow them down."""
    a, b = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(TRIALS):
        began = time.process_time()
        a @ b
        best = min(best, time.process_time() - began)
    return 2 * SIZE**3 / best


if __name__ == "__main__":
    rates = {"fp32": flops_per_cpu_second(torch.float32), "bf16": flops_per_cpu_second(torch.bfloat16)}
    print(json.dumps(rates))
