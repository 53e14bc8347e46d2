"""Rank functions of tests of the Megatron engine."""

import math
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from components.checkpoint.flat_shard import FlatShard
from components.contracts.engine import EngineOptions
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.mesh import local_shard
from components.engines.megatron import Megatron
from components.engines.megatron.compat import gradient_fusion
from components.engines.shared.added_product import add_product
from components.models import ModelSpec
from components.optimizers import AdamW
from tests.distributed.cases import COMMON, SHAPES, Step, make_engine, next_token, share, step
from tests.distributed.gradients import capture


def engine_step(on: Megatron, family: str, layout: str, micro_batch: int, **options: Any) -> Step:
    """Return one step on eight sequences, with the gradients that the engine updates with."""
    engine = make_engine(family, on=on, **options)
    grads = capture(engine)
    result = step(engine, share(engine, layout, micro_batch), next_token())
    engine.close()
    return Step(result.loss, result.grad_norm, grads)


def num_accumulated(on: Megatron) -> int:
    """Return how many weight gradients of a step on four micro-batches their matmul accumulates."""
    with patch.object(gradient_fusion, "add_product", wraps=add_product) as accumulate:
        engine_step(on, "qwen3", "packed", 2)
    return accumulate.call_count


def odd_vocabulary(on: FSDP2 | Megatron) -> tuple[float, float, int | None]:
    """Return loss, norm and number of zeros of the second step of a model with an odd vocabulary size."""
    odd = ModelSpec(architecture=COMMON | SHAPES["llama"] | {"vocab_size": 161})
    engine = on.build(
        odd,
        AdamW(lr=1e-3, max_grad_norm=None),
        EngineOptions(dtype=torch.float32, device="cpu", count_zeros=True),
    )
    for _ in range(2):
        result = step(engine, share(engine, "packed", 2), next_token())
    engine.close()
    return result.loss, result.grad_norm, result.num_zeros


def describe(on: Megatron) -> dict[str, Any]:
    """Return ``describe()``, which gathers the mesh; building an engine does not."""
    where = "components.engines.megatron.runtime.engine.gather_mesh_info"
    with patch(where, side_effect=AssertionError("while the engine is built")):
        engine = make_engine(on=on)
    described = engine.describe()
    engine.close()
    return described


def buckets_under_way(on: Megatron) -> list[int]:
    """Return the number of gradient reductions that have begun before each of two steps is finished."""
    engine, loss = make_engine(on=on), next_token()
    begun = []
    for _ in range(2):
        engine.begin_train_step()
        engine.train_microbatches(share(engine, "packed", 2), loss, last=True)
        begun.append(sum(group.grad_reduce_handle is not None for group in engine._bucket_groups()))
        engine.finish_train_step(1e-3)
    engine.close()
    return begun


def three_steps(on: FSDP2 | Megatron, family: str) -> list[tuple[float, float]]:
    engine = make_engine(family, on=on)
    results = [step(engine, share(engine, "packed", 2, seed=s), next_token()) for s in range(3)]
    engine.close()
    return [(result.loss, result.grad_norm) for result in results]


def kept_for_a_checkpoint(on: Megatron) -> dict[str, int]:
    """Return the number of elements of each tensor that this rank writes to disk."""
    engine = make_engine(on=on)
    kept = {name: saved(tensor) for name, tensor in engine.tensors().items()}
    engine.close()
    return kept


def saved(tensor: Tensor) -> int:
    if isinstance(tensor, FlatShard):
        return sum(math.prod(box.sizes) for box in tensor.chunks)
    return local_shard(tensor).numel()
