"""Communication between context-parallel ranks, each of which holds a share of every row.

Attention needs whole rows: one all-to-all exchanges the rank's positions of all heads for all positions of a
share of the heads, and a second one is its inverse (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509). A
loss needs whole rows too: the shares of its inputs are gathered.
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
    """Exchange this rank's positions of all heads for all positions of its share of heads.

    Rank r gets the r-th share of heads, with positions in rank order. Key-value heads are repeated if cp does
    not divide them. One all-to-all exchanges all three tensors. Collective over ``group``, like the backward
    pass.

    Args:
        query: cp must divide its number of heads; key and value may have fewer heads.
        heads: index of the dimension of the heads, which shrinks.
        positions: index of the dimension of the positions, which grows.
    """
    cp = group.size()
    assert query.shape[heads] % cp == 0, f"{query.shape[heads]} heads a rank do not divide by cp {cp}"
    repeats = head_repeats(key.shape[heads], cp)
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, heads) for tensor in (key, value))
    traded: tuple[Tensor, ...] = HeadSeqAllToAll.apply(group, heads, positions, query, key, value)
    return traded


def head_repeats(heads: int, cp: int) -> int:
    """Return how often each of a rank's ``heads`` of keys and values is repeated, so that cp divides them."""
    return cp // math.gcd(heads, cp)


def heads_to_seq(out: Tensor, group: dist.ProcessGroup, *, heads: int, positions: int) -> Tensor:
    """Exchange all positions of this rank's heads for its positions of all heads.

    It is the inverse of ``seq_to_heads`` for one tensor, and collective like it.
    """
    traded: tuple[Tensor, ...] = HeadSeqAllToAll.apply(group, positions, heads, out)
    return traded[0]


class HeadSeqAllToAll(torch.autograd.Function):
    """All-to-all that splits every tensor along ``give`` and joins the received parts along ``take``."""

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
    """All-gather ``[B, L]`` to ``[B, cp * L]`` in rank order.

    Every rank computes the same loss from the result. So in the backward pass each rank already has the full
    gradient and takes its own slice: a sum over ranks (the usual backward of an all-gather) would count the
    loss ``cp`` times. Weight gradients are summed over data and context ranks, and contain the contribution
    of each slice once.
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
    """Return the part ``[B, L]`` of ``rank`` from ``[B, cp * L]`` in rank order."""
    return whole.chunk(cp, dim=1)[rank].contiguous()
