"""GPU kernels that torch.compile generates from functions of elementwise operations and row sums."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def is_available(tensor: Tensor) -> bool:
    """Return whether torch.compile can generate kernels that read ``tensor``.

    They need Triton and a GPU of compute capability 7.0 or above, in bf16 8.0.
    """
    if not (tensor.is_cuda and can_compile()):
        return False
    least = (8, 0) if tensor.dtype == torch.bfloat16 else (7, 0)
    return torch.cuda.get_device_capability(tensor.device) >= least


@cache
def can_compile() -> bool:
    """Return whether Triton is installed, with the C compiler and the headers of Python that it needs."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return find_spec("triton") is not None and headers.is_file() and any(map(shutil.which, compilers))


@cache
def compiled(function: Callable[..., object]) -> Callable[..., Any]:
    return torch.compile(function)
