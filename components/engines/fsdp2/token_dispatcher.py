"""Dispatch of token rows to the ranks of their experts, and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Permute(torch.autograd.Function):
    """Compute ``rows[order // copies]``, with ``order`` a permutation of all copies of all rows.

    With ``inverse``, the inverse of ``order``, the backward pass gathers rows instead of scattering them. So
    its sums are deterministic.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(inverse)
        return rows[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        back = grads[0][inverse]
        return back.view(-1, ctx.copies, back.shape[-1]).sum(1) if ctx.copies > 1 else back, None, None, None


class AllToAll(torch.autograd.Function):
    """Send ``give[r]`` consecutive rows to each rank r of ``group``, and receive ``take[r]`` rows from it.

    Collective (all-to-all), like its backward pass, which sends the gradients back.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.give, ctx.take, ctx.group = give, take, group
        return all_to_all(rows, give, take, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(grads[0], ctx.take, ctx.give, ctx.group), None, None, None


def all_to_all(rows: Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), take, give, group=group)
    return received


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the inverse permutation of ``order``, ``[N]``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
