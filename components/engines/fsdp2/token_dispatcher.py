"""Rows of tokens on their way to the ranks that have the experts they chose, and back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Permute(torch.autograd.Function):
    """``rows[order // copies]``, where ``order`` is a permutation of all copies of all rows.

    ``inverse`` undoes it: the backward pass only reads, and its sums do not depend on chance.
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
    """The first ``give[0]`` rows to rank 0 of ``group`` and so on, for ``take[0]`` of its own and so on.

    Collective, like its backward pass, which sends the gradients back.
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
    """``[N]``: the permutation that undoes ``order``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
