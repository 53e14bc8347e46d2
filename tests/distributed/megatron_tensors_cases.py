"""Rank functions of test_megatron_weights.py: checkpoints of tensors with the shapes of the parameters."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, save_tensors
from components.models import ModelSpec, WeightSource
from tests.distributed.megatron_weights_cases import Model, Sizes, build, layout

KINDS = ("model", "exp_avg", "exp_avg_sq")


def value(kind: str, weights: WeightSource) -> WeightSource:
    """Return the values of a kind of tensor, which are the weights times a factor."""
    factor = KINDS.index(kind) + 1
    return lambda name, index=(): weights(name, index) * factor


def checkpoint_tensors(
    model: Model, tensors: dict[str, dict[Any, Tensor]]
) -> dict[str, tuple[Any, Any, Tensor]]:
    """Return for each key the block, the tensor that contains it, and the part that a checkpoint stores."""
    return {
        f"{kind}/{block.name}": (block, tensor[parameter], block.read(tensor[parameter]))
        for kind, tensor in tensors.items()
        for parameter, members in model.blocks.items()
        for block in members
    }


def like_parameters(model: Model) -> dict[str, dict[Any, Tensor]]:
    return {kind: {p: torch.zeros_like(p.detach()) for p in model.blocks} for kind in KINDS}


def save_checkpoint(sizes: Sizes, spec: ModelSpec, path: Path) -> None:
    from components.engines.megatron.runtime.hf_weights import as_dtensor, fill_parameter

    with layout(sizes) as parallelism:
        model, weights = build(spec, parallelism), spec.weights(0)
        tensors = like_parameters(model)
        for kind, by_parameter in tensors.items():
            for parameter, tensor in by_parameter.items():
                fill_parameter(tensor, model.blocks[parameter], value(kind, weights))
        entries = checkpoint_tensors(model, tensors).items()
        saved = {key: as_dtensor(b, part, model.meshes.dense) for key, (b, _, part) in entries if b.primary}
        save_tensors(path, saved | {"optimizer_step": torch.tensor([3.0])})


def load_checkpoint(sizes: Sizes, spec: ModelSpec, path: Path) -> list[str]:
    """Load a checkpoint and return the keys whose values, including padding, differ from ``value``."""
    from components.engines.megatron.runtime.hf_weights import as_dtensor, fill_parameter

    with layout(sizes) as parallelism:
        model, weights = build(spec, parallelism), spec.weights(0)
        tensors, expected = like_parameters(model), like_parameters(model)
        entries = checkpoint_tensors(model, tensors)
        load_tensors(
            path, {key: as_dtensor(b, part, model.meshes.dense) for key, (b, _, part) in entries.items()}
        )
        for block, tensor, part in entries.values():
            block.write(tensor, part)
        wrong = []
        for kind in KINDS:
            for parameter, members in model.blocks.items():
                fill_parameter(expected[kind][parameter], members, value(kind, weights))
                if not torch.equal(expected[kind][parameter], tensors[kind][parameter]):
                    wrong.append(f"{kind}/{members[0].name}")
        return wrong


def gathered_moments(sizes: Sizes, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the full Hugging Face tensors of moments, which are not the weights themselves."""
    from components.engines.megatron.runtime.hf_weights import fill_parameter, full_hf_tensor

    with layout(sizes) as parallelism:
        model, weights = build(spec, parallelism), spec.weights(0)
        moments = like_parameters(model)["exp_avg"]
        for parameter, tensor in moments.items():
            fill_parameter(tensor, model.blocks[parameter], value("exp_avg", weights))
        return {
            member.name: full_hf_tensor(member, member.read(moments[parameter]), model.meshes.dense)
            for parameter, members in model.blocks.items()
            for member in members
            if member.primary
        }


def fsdp2_engine(spec: ModelSpec) -> Any:
    from components.contracts.engine import EngineOptions
    from components.engines.fsdp2 import FSDP2
    from components.optimizers import AdamW

    return FSDP2(dp=4, default_dp=1, reshard_after_forward=True).build(
        spec,
        AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=None),
        EngineOptions(dtype=torch.float32, device="cpu"),
    )


def save_by_fsdp2(spec: ModelSpec, path: Path) -> None:
    """Save a checkpoint of the FSDP2 engine with the tensors of ``value``."""
    from components.engines.fsdp2.parallelize import copy_slice

    engine, weights = fsdp2_engine(spec), spec.weights(0)
    engine.tensors()  # creates the moments
    for name, parameter in engine.weights.items():
        copy_slice(parameter, name, value("model", weights))
        for kind in engine.optimizer.moments:
            copy_slice(engine.optimizer.moment(kind, parameter), name, value(kind, weights))
    save_tensors(path, engine.tensors())


def load_by_fsdp2(spec: ModelSpec, path: Path) -> dict[str, Tensor]:
    from components.engines.fsdp2.mesh import full_tensor

    engine = fsdp2_engine(spec)
    engine.load(path)
    found = {}
    for name, parameter in engine.weights.items():
        found[f"model/{name}"] = full_tensor(parameter.detach())
        for kind in engine.optimizer.moments:
            found[f"{kind}/{name}"] = full_tensor(engine.optimizer.moment(kind, parameter))
    return found
