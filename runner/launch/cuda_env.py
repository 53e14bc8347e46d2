"""Environment variables that CUDA and torch read once per process, when they start."""

import os

DEFAULTS = {
    # cuBLAS: read at the first product, which may come before a run with run.deterministic=true.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch: rows of varying length fragment the GPU's memory less with this setting.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}

EARLIER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Variable -> its earlier name, which torch also reads. If this is set, the variable gets no default."""


def set_cuda_defaults() -> None:
    """Set the variables that the user has not set, for this process and the ranks that it starts."""
    for name, value in DEFAULTS.items():
        if EARLIER_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)
