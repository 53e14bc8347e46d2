"""What the forecast of a run takes from its layout, which it knows by its type: that of an engine of ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.configs import AdapterConfig, OptimizerConfig
from components.contracts.parallelism import ParallelismSpec
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.optimizers import Optimizer
from components.preflight.estimates import fsdp2_memory as fsdp2_estimate
from components.preflight.estimates import megatron_memory as megatron_estimate
from components.preflight.estimates.quantities import MemoryInputs, ModelSize, RankMemory, StepCost
from components.preflight.search import fsdp2_layouts as fsdp2_layouts
from components.preflight.search import megatron_layouts as megatron_layouts

EngineLayout = FSDP2 | Megatron
"""A parallelism of neither type has no forecast."""


def known_parts(
    layout: ParallelismSpec, optimizer: OptimizerConfig, adapter: AdapterConfig | None
) -> tuple[EngineLayout, Optimizer, LoRA | None] | None:
    """Return the arguments if a forecast knows them all, or None if one is of the user's own."""
    if (
        isinstance(layout, EngineLayout)
        and isinstance(optimizer, Optimizer)
        and isinstance(adapter, LoRA | None)
    ):
        return layout, optimizer, adapter
    return None


def mesh_info(layout: EngineLayout, world_size: int) -> dict[str, Any]:
    """Sizes by dimension, and the global rank at every place, as ``Engine.describe`` will tell them."""
    if isinstance(layout, FSDP2):
        return fsdp2_layouts.mesh_info(layout, world_size)
    return megatron_layouts.mesh_info(layout, world_size)


def memory(
    layout: EngineLayout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """What a rank of every pipeline stage will need, in the order of the stages; builds nothing.

    ``model`` is the transformers model on the meta device, without its adapter.
    """
    if isinstance(layout, FSDP2):
        return fsdp2_estimate.memory(layout, model, optimizer, step)
    return megatron_estimate.memory(layout, model, optimizer, step)


def comm_cost(
    layout: EngineLayout,
    size: ModelSize,
    *,
    world_size: int,
    dtype: torch.dtype,
    tokens: float,
    num_microbatches: int,
) -> StepCost:
    """``tokens``: of one data rank in one step, which takes them in so many micro-batches."""
    step: dict[str, Any] = {
        "world_size": world_size,
        "dtype": dtype,
        "tokens": tokens,
        "num_microbatches": num_microbatches,
    }
    if isinstance(layout, FSDP2):
        return fsdp2_layouts.comm_cost(layout, size, **step)
    return megatron_layouts.comm_cost(layout, size, **step)


def memory_savers(layout: EngineLayout, world_size: int) -> Sequence[Mapping[str, Any]]:
    """Changes of keys, each of which may have a rank hold less; not all of them fit every model."""
    if isinstance(layout, FSDP2):
        return fsdp2_layouts.memory_savers(layout, world_size)
    return megatron_layouts.memory_savers(layout, world_size)
