"""``run.deterministic=true``: equal runs give bitwise equal results.

Operations without a deterministic implementation raise an error.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Variables that cuBLAS and transformer-engine read when CUDA starts, and that must be set before then."""


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Enable deterministic algorithms in this process; restore all settings afterwards."""
    if not enabled:
        yield
        return
    environ = {name: os.environ.get(name) for name in ENVIRONMENT}
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ |= ENVIRONMENT
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Otherwise torch writes NaN into every new empty tensor, such as those of logits.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        for name, value in environ.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
