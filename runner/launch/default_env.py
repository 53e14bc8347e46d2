"""Environment variables that CUDA, OpenMP and torch read once per process, when they start."""

import os

DEFAULTS = {
    # cuBLAS: read at the first product, which may come before a run with run.deterministic=true.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch: rows of varying length fragment the GPU's memory less with this setting.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # GNU OpenMP: a waiting thread sleeps after 3,000 iterations of its loop, not after 300,000, so that
    # another thread can use its core if a second process keeps a core busy.
    "GOMP_SPINCOUNT": "3000",
}

OTHER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF", "GOMP_SPINCOUNT": "OMP_WAIT_POLICY"}
"""Variable -> another one that sets the same. If this is set, the variable gets no default."""


def set_default_env() -> None:
    """Set the variables that the user has not set, for this process and the ranks that it starts."""
    for name, value in DEFAULTS.items():
        if OTHER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)
