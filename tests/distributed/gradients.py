"""The gradients that an engine updates with, whole, under Hugging Face names."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.fsdp2.mesh import whole


def capture(engine: Any) -> dict[str, Tensor]:
    """Filled whenever the engine drops gradients, and so by the end of a step; clipped if it clips.

    Every rank of the engine calls it, and every rank gets all gradients.
    """
    found: dict[str, Tensor] = {}
    drop = engine._drop_gradients

    def look_first() -> None:
        found.update(gradients(engine))
        drop()

    engine._drop_gradients = look_first
    return found


def gradients(engine: Any) -> dict[str, Tensor]:
    """What the optimizer of ``engine`` was given; float32, collective, the same on every rank."""
    if hasattr(engine, "update"):
        return megatron_gradients(engine)
    return {name: whole(p.grad).clone() for name, p in engine.weights.items()}


def megatron_gradients(engine: Any) -> dict[str, Tensor]:
    from components.engines.megatron.runtime.weights import gathered

    def gradient(parameter: torch.nn.Parameter) -> Tensor:
        values = torch.zeros_like(parameter, dtype=torch.float32)
        if (found := engine.update.shard(parameter)) is not None:
            main, where = found
            values.view(-1)[where] = main.grad.reshape(-1)
        if engine.update.distributed:
            dist.all_reduce(values, group=engine.update.dp_cp)
        return values

    here = {name: value.clone() for name, value in gathered(engine.blocks, engine.tp_mesh, gradient)}
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, here)
    return {name: value for stage in stages for name, value in stage.items()}
