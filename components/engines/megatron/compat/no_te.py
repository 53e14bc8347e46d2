"""Patches for parts of megatron-core that use transformer-engine or Apex although torch would suffice.

They apply on any device.
"""

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any

import torch
from torch import nn

from components.engines.megatron.compat.patching import Patch
from components.engines.megatron.te_install import has_transformer_engine


def mark_sequence_parallel(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(original)
    def new(cls: type, config: Any, *args: object, **kwargs: object) -> nn.Module:
        plain = copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients that tp ranks computed, each from its own positions.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    return new


PATCHES = (
    Patch(
        symbols=("megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",),
        why="refuses sequence_parallel, which changes nothing for a norm but the reduction of its gradient",
        replace=mark_sequence_parallel,
    ),
    Patch(
        symbols=("megatron.core.transformer.multi_latent_attention.HAVE_TE",),
        why="is true without transformer-engine, whose classes are None then, and asks for their instances",
        replace=lambda _: has_transformer_engine(),
    ),
    # On a GPU, torch's AdamW is fused too (MegatronOptimizers.build).
    Patch(
        symbols=("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",),
        why="is false where transformer-engine or Apex is installed, whose Adam only a real GPU can make",
        replace=lambda _: True,
    ),
    Patch(
        symbols=("megatron.core.optimizer.SGD",),
        why="is that of transformer-engine or Apex where one is installed, which only a real GPU can make",
        replace=lambda _: torch.optim.SGD,
    ),
)
