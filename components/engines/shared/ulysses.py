"""What context-parallel ranks, which hold a share of every row each, send each other.

Attention needs whole rows: each rank trades its positions for a share of the heads, and back (DeepSpeed
Ulysses, https://arxiv.org/abs/2309.14509). A loss needs them too: the shares of its inputs are gathered.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def seq_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, *, heads: int, positions: int
) -> tuple[Tensor, ...]:
    """Own positions of all heads to all positions, in rank order, of the r-th share of heads on rank r.

    Key-value heads are repeated where cp does not divide them. One exchange for all three; collective over
    ``group``, like its backward.

    Args:
        query: cp must divide its ``heads``; key and value may have fewer heads.
        heads: the dimension that is cut; ``positions``: the one that grows.
    """
    cp = group.size()
    assert query.shape[heads] % cp == 0, f"{query.shape[heads]} heads a rank do not divide by cp {cp}"
    repeats = cp // math.gcd(key.shape[heads], cp)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, heads) for tensor in (key, value))
    traded: tuple[Tensor, ...] = HeadSeqAllToAll.apply(group, heads, positions, query, key, value)
    return traded


def heads_to_seq(out: Tensor, group: dist.ProcessGroup, *, heads: int, positions: int) -> Tensor:
    """All positions of own heads back to own positions of all heads."""
    traded: tuple[Tensor, ...] = HeadSeqAllToAll.apply(group, positions, heads, out)
    return traded[0]


class HeadSeqAllToAll(torch.autograd.Function):
    """Cuts every tensor along the dimension ``give`` and joins what arrives along ``take``."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, give: int, take: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.give, ctx.take = group, give, take
        return head_seq_all_to_all(tensors, group, give, take)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *head_seq_all_to_all(grads, ctx.group, ctx.take, ctx.give)


def head_seq_all_to_all(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, give: int, take: int
) -> tuple[Tensor, ...]:
    parts = [tensor.unflatten(give, (group.size(), -1)).movedim(give, 0) for tensor in tensors]
    sizes = [part[0].numel() for part in parts]
    sent = tensors[0].new_empty(group.size(), sum(sizes))
    for space, part in zip(sent.split(sizes, 1), parts, strict=True):
        space.unflatten(1, part.shape[1:]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    arrived = zip(received.split(sizes, 1), parts, strict=True)
    joined = (space.unflatten(1, part.shape[1:]).movedim(0, take) for space, part in arrived)
    return tuple(tensor.flatten(take, take + 1) for tensor in joined)


class AllGatherShards(torch.autograd.Function):
    """``[B, L]`` to ``[B, cp * L]`` in rank order.

    Every rank computes the same loss from the result, so each holds the whole gradient already. A rank takes
    its own slice: a sum over ranks (the usual backward of a gather) would count the one loss ``cp`` times.
    What the other slices do to the weights is added by the rank they belong to, when gradients are summed
    over data and context ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.cp, ctx.rank = group.size(), group.rank()
        values = values.contiguous()
        shares = [torch.empty_like(values) for _ in range(ctx.cp)]
        dist.all_gather(shares, values, group=group)
        return torch.cat(shares, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return rank_slice(grads[0], ctx.cp, ctx.rank), None


def rank_slice(whole: Tensor, cp: int, rank: int) -> Tensor:
    """``[B, cp * L]`` in rank order to the ``[B, L]`` of ``rank``."""
    return whole.chunk(cp, dim=1)[rank].contiguous()
