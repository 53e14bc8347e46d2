"""The gradients that an engine updates with, whole, under Hugging Face names."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.fsdp2.mesh import full_tensor


def capture(engine: Any) -> dict[str, Tensor]:
    """Filled whenever the engine drops gradients, and so by the end of a step; clipped if it clips.

    Every rank of the engine calls it, and every rank gets all gradients.
    """
    found: dict[str, Tensor] = {}
    drop = engine.zero_grad

    def look_first() -> None:
        found.update(gradients(engine))
        drop()

    engine.zero_grad = look_first
    return found


def gradients(engine: Any) -> dict[str, Tensor]:
    """What the optimizer of ``engine`` was given; float32, collective, the same on every rank."""
    if hasattr(engine, "update"):
        return megatron_gradients(engine)
    # Not every rank has all experts.
    here = {m.name: full_tensor(m.slices(m.parameter.grad)).clone() for m in engine.trained}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return {name: value for rank in everywhere for name, value in rank.items()}


def megatron_gradients(engine: Any) -> dict[str, Tensor]:
    from components.engines.megatron.runtime.hf_weights import full_hf_tensor

    here: dict[str, Tensor] = {}
    for parameter, members in engine.blocks.items():
        values, of = torch.zeros_like(parameter, dtype=torch.float32), engine.update.of(parameter)
        if (found := of.shard(parameter)) is not None:
            main, where = found
            values.view(-1)[where] = main.grad.reshape(-1)
        if of.distributed:
            dist.all_reduce(values, group=of.replicas)
        for member in members:
            if member.primary:
                here[member.name] = full_hf_tensor(
                    member, member.read(values), engine.meshes.of(member)
                ).clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return {name: value for rank in everywhere for name, value in rank.items()}
