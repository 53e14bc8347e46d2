"""GPU kernels that torch.compile generates from functions of elementwise operations and row sums."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


@cache
def is_available(device: str) -> bool:
    """Return whether torch.compile can generate kernels for the device type ``device``.

    They need Triton, which needs a C compiler and a GPU of compute capability 7.0 or above.
    """
    if device != "cuda" or find_spec("triton") is None or torch.cuda.get_device_capability() < (7, 0):
        return False
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    return any(shutil.which(name) for name in compilers if name)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
