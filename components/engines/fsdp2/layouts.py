"""Layouts of FSDP2 beside the one that was asked for: what they send, which hold less, all there are."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from components.engines.cost import FP32, all_reduced, gathered, tensor_parallel, traded_heads
from components.engines.layout import RECOMPUTED_MORE, divisors
from runner.protocols import ModelSize, Sent, StepCost

if TYPE_CHECKING:
    from components.engines.fsdp2.spec import FSDP2


def mesh(layout: "FSDP2", world_size: int) -> dict[str, Any]:
    """As ``components.engines.fsdp2.mesh.make_mesh`` cuts the ranks."""
    replicate, cp, tp = layout.dp_replicate, layout.cp, layout.tp
    dims = {
        "dp_replicate": replicate,
        "dp_shard": world_size // (replicate * cp * tp),
        "cp": cp,
        "tp": tp,
    }
    return {"dims": dims, "ranks": torch.arange(world_size).view(*dims.values()).tolist()}


def cost(
    layout: "FSDP2",
    size: ModelSize,
    *,
    world_size: int,
    dtype: torch.dtype,
    tokens: float,
    num_microbatches: int,
) -> StepCost:
    """Every micro-batch gathers the weights, once more for its backward pass where a block lets go of them;
    gradients are scattered once a step, in fp32 (Rajbhandari et al., 2020, section 7)."""
    shards = world_size // (layout.dp_replicate * layout.tp)
    held, trained = size.parameters / layout.tp, size.trained / layout.tp
    gathers = num_microbatches * (2 if layout.reshard_after_forward else 1)
    weights = gathers * gathered(held * dtype.itemsize, shards)
    sent = [Sent("dp_shard", weights + gathered(trained * FP32, shards), when="behind")]
    if layout.dp_replicate > 1:
        copies = all_reduced(trained / shards * FP32, layout.dp_replicate)
        sent.append(Sent("dp_replicate", copies, when="behind"))
    if layout.cp > 1:
        sent.append(traded_heads(size, layout.cp, layout.tp, tokens, dtype.itemsize))
    if layout.tp > 1:
        own = tokens / layout.cp
        recomputed = layout.activation_checkpointing
        sent.append(tensor_parallel(size, layout.tp, own, dtype.itemsize, recomputed=recomputed))
    if layout.cpu_offload:
        shard = (gathers * held * dtype.itemsize + trained * FP32) / shards
        sent.append(Sent("host", shard, when="behind"))
    return StepCost(sent, bubble=0.0, recomputed=layout.activation_checkpointing)


def leaner(layout: "FSDP2", world_size: int) -> list[Mapping[str, Any]]:
    """On the same ranks; then on more."""
    dp = layout.data_size(world_size)
    found: list[Mapping[str, Any]] = [
        {"activation_checkpointing": kind} for kind in RECOMPUTED_MORE[layout.activation_checkpointing]
    ]
    if not layout.reshard_after_forward:
        found.append({"reshard_after_forward": True})
    if layout.dp_replicate > 1:
        found.append({"dp_replicate": 1})
    if not layout.cpu_offload:
        found.append({"cpu_offload": True})
    for key in ("tp", "cp"):
        size = getattr(layout, key) * 2
        if dp % 2 == 0:
            found.append({key: size, "dp": dp // 2})
        found.append({key: size, "dp": dp})
    return found + [{"dp": dp * times} for times in (2, 4, 8)]


def layouts(devices: int, per_node: int) -> Iterator[Mapping[str, Any]]:
    """Every way to share ``devices`` ranks, as keys; matrices are split within a node of ``per_node``."""
    for tp in divisors(devices):
        if tp > per_node:
            continue
        for cp in divisors(devices // tp):
            dp = devices // (tp * cp)
            nodes = -(-devices // per_node)
            copies = {1, nodes} if dp % nodes == 0 else {1}
            yield from ({"dp": dp, "dp_replicate": n, "cp": cp, "tp": tp} for n in sorted(copies))
