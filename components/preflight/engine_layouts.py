"""Functions of the forecast that differ between the layouts of FSDP2 and Megatron."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.configs import AdapterConfig, OptimizerConfig
from components.contracts.json_types import Config, Json
from components.contracts.parallelism import ParallelismSpec
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.engines.megatron.checks import updates_whole_weights
from components.optimizers import Optimizer, needs_whole_weights
from components.preflight.estimates import fsdp2_memory, megatron_memory
from components.preflight.estimates.quantities import (
    CommInputs,
    MemoryInputs,
    ModelSize,
    RankMemory,
    StepCost,
)
from components.preflight.search import fsdp2_layouts, megatron_layouts

EngineLayout = FSDP2 | Megatron
"""Layouts that have a forecast."""


def known_parts(
    layout: ParallelismSpec, optimizer: OptimizerConfig, adapter: AdapterConfig | None
) -> tuple[EngineLayout, Optimizer, LoRA | None] | None:
    """Return the arguments if all have the types that a forecast supports, otherwise None."""
    if (
        isinstance(layout, EngineLayout)
        and isinstance(optimizer, Optimizer)
        and isinstance(adapter, LoRA | None)
    ):
        return layout, optimizer, adapter
    return None


def mesh_info(layout: EngineLayout, world_size: int) -> Json:
    """Return the mesh of ``Engine.describe``: size by dimension, and the global rank at every coordinate."""
    if isinstance(layout, FSDP2):
        dims, experts = fsdp2_layouts.mesh_dims(layout, world_size)
    else:
        dims, experts = megatron_layouts.mesh_dims(layout, world_size)

    def numbered(sizes: dict[str, int]) -> Json:
        return {"dims": sizes, "ranks": torch.arange(world_size).view(*sizes.values()).tolist()}

    return numbered(dims) | ({} if experts is None else {"experts": numbered(experts)})


def memory(
    layout: EngineLayout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """Estimate the peak memory of one rank of each pipeline stage, without building the model.

    ``model`` is the transformers model on the meta device, without its adapter.
    """
    if isinstance(layout, FSDP2):
        return fsdp2_memory.memory(layout, model, optimizer, step)
    return megatron_memory.memory(layout, model, optimizer, step)


def comm_cost(layout: EngineLayout, size: ModelSize, step: CommInputs) -> StepCost:
    """Estimate the communication of a step."""
    if isinstance(layout, FSDP2):
        return fsdp2_layouts.comm_cost(layout, size, step)
    return megatron_layouts.comm_cost(layout, size, step)


def has_owners(layout: EngineLayout, optimizer: Optimizer) -> bool:
    """Return whether each full (unsharded) weight is updated by one rank, its owner."""
    if isinstance(layout, FSDP2):
        return needs_whole_weights(optimizer)
    return updates_whole_weights(optimizer)


def memory_savers(layout: EngineLayout, world_size: int) -> Sequence[Config]:
    """Return changes of keys that may reduce the memory of a rank; some may not be valid for a model."""
    if isinstance(layout, FSDP2):
        return fsdp2_layouts.memory_savers(layout, world_size)
    return megatron_layouts.memory_savers(layout, world_size)
