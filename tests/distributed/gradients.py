"""The full gradients that an engine updates with, by Hugging Face name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.fsdp2.mesh import full_tensor


def capture(engine: Any, *, first_only: bool = False) -> dict[str, Tensor]:
    """Return a dict that is filled when the engine drops its gradients at the end of a step.

    Gradients are clipped if the engine clips them. Every rank of the engine calls this, and every rank gets
    all gradients. With ``first_only`` the dict keeps those of the first step.
    """
    found: dict[str, Tensor] = {}
    drop = engine.zero_grad

    def look_first() -> None:
        if first_only:
            engine.zero_grad = drop
        found.update(gradients(engine))
        drop()

    engine.zero_grad = look_first
    return found


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the optimizer's gradients in float32 on every rank. This is a collective."""
    if hasattr(engine, "update"):
        return megatron_gradients(engine)
    # With expert parallelism, a rank holds only some experts.
    here = {m.name: full_tensor(m.slices(m.parameter.grad)).clone() for m in engine.trained}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return {name: value for rank in everywhere for name, value in rank.items()}


def megatron_gradient(update: Any, parameter: Any) -> Tensor:
    if hasattr(update, "parts"):  # an optimizer of whole weights, for which every rank has the whole sum
        return parameter.main_grad
    values, of = torch.zeros_like(parameter, dtype=torch.float32), update.of(parameter)
    if (found := of.shard(parameter)) is not None:
        main, where = found
        values.view(-1)[where] = main.grad.reshape(-1)
    if of.distributed:
        dist.all_reduce(values, group=of.replicas)
    return values


def megatron_gradients(engine: Any) -> dict[str, Tensor]:
    from components.engines.megatron.runtime.hf_weights import full_hf_tensor

    here: dict[str, Tensor] = {}
    for parameter, members in engine.blocks.items():
        values = megatron_gradient(engine.update, parameter)
        for member in members:
            if member.primary:
                here[member.name] = full_hf_tensor(
                    member, member.read(values), engine.meshes.of(member)
                ).clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return {name: value for rank in everywhere for name, value in rank.items()}
