"""Recording of functions that are one compiled kernel on a GPU, but that a rehearsal runs op by op."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from components.engines.shared import generated_kernels
from components.rehearsal.mode import RehearsalMode

MODULE = "megatron.core.fusions.fused_bias_swiglu"
FUNCTIONS = ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")


def install(mode: RehearsalMode) -> None:
    """Count each compiled function as one kernel that allocates only its result.

    This function must be called after the engine is built, which imports Megatron.
    """
    own: Any = generated_kernels
    own.is_available = lambda _tensor: True
    own.compiled = lambda function: one_kernel(function, mode)
    if (module := sys.modules.get(MODULE)) is not None:
        for name in FUNCTIONS:
            setattr(module, name, one_kernel(getattr(module, name), mode))


def one_kernel(function: Callable[..., object], mode: RehearsalMode) -> Callable[..., object]:
    @wraps(function)
    def call(*args: object) -> object:
        if mode.memory.paused:
            return function(*args)  # called by another of these functions
        kernels = mode.arithmetic.kernels.copy()
        mode.memory.paused += 1
        try:
            out = function(*args)
        finally:
            mode.memory.paused -= 1
        kernels[mode.moment] += 1
        mode.arithmetic.kernels = kernels
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                mode.memory.hold(leaf)
        return out

    return call
