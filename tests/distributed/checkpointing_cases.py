"""Rank functions of test_activation_checkpointing.py."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.engine import EngineOptions, StepResult
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.mesh import full_tensor, local_shard
from components.losses import NextToken
from components.models import ModelSpec
from components.optimizers import AdamW
from tests.distributed.cases import COMMON, SHAPES, next_token, share, step


@dataclass(frozen=True)
class Outcome:
    """Result of two steps of the engine."""

    results: list[StepResult]
    gradients: dict[str, Tensor]
    """Full gradients of the first step."""
    weights: dict[str, Tensor]
    saved_bytes: int
    """Activation memory: bytes that a forward pass saves for the backward pass, without weights."""


def build(on: FSDP2, dropout: float, dtype: torch.dtype) -> FSDP2Engine:
    architecture = COMMON | SHAPES["qwen3"] | {"attention_dropout": dropout}
    return on.build(
        ModelSpec(architecture=architecture),
        AdamW(lr=1e-3, weight_decay=0.1),
        EngineOptions(dtype=dtype, device="cpu"),
    )


def two_steps(on: FSDP2, layout: str, dropout: float, dtype: torch.dtype) -> Outcome:
    engine, loss = build(on, dropout, dtype), next_token()
    saved = saved_bytes(engine, share(engine, layout, 4)[0], loss)
    gradients: dict[str, Tensor] = {}
    update = engine.apply_update

    def capture(*args: Any) -> None:
        if not gradients:
            gradients.update({name: full_tensor(p.grad).clone() for name, p in engine.weights.items()})
        update(*args)

    engine.apply_update = capture  # type: ignore[method-assign]
    results = [step(engine, share(engine, layout, 4, seed), loss) for seed in range(2)]
    weights = {name: full_tensor(p.detach()).clone() for name, p in engine.weights.items()}
    engine.close()
    return Outcome(results, gradients, weights, saved)


def saved_bytes(engine: FSDP2Engine, batch: Batch, loss: NextToken) -> int:
    """Return the bytes that a forward pass saves for its backward pass.

    Tensors that are recomputed are not counted, because inner hooks handle them.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # While weights are gathered, they are the current parameters. They are not activations.
        weights = {local_shard(p).untyped_storage().data_ptr() for p in engine.scorer.parameters()}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    engine.begin_train_step()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_microbatches([batch], loss)
    engine.abort_train_step()
    return sum(kept.values())
