"""Products of the rows of several experts with their matrices, in one kernel or in a loop."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

ALIGNED = 8
"""Sizes in grouped bf16 matrix products must be multiples of this."""


def has_grouped_kernel(rows: Tensor, outputs: int) -> bool:
    """Return whether torch has a grouped product of ``rows`` ``[N, in]`` with matrices ``[outputs, in]``."""
    fits = rows.shape[1] % ALIGNED == 0 and outputs % ALIGNED == 0 and len(rows) > 0
    return rows.is_cuda and rows.dtype == torch.bfloat16 and fits


def grouped(rows: Tensor, weight: Tensor, loads: Tensor) -> Tensor:
    """Multiply ``rows`` ``[N, in]``, ``loads[e]`` of them by ``weight[e]`` ``[out, in]``, to ``[N, out]``.

    The host does not wait for ``loads``.
    """
    visited = UsedExpertsOnly.apply(weight, loads)
    return F.grouped_mm(rows, visited.transpose(1, 2), offs=loads.cumsum(0, dtype=torch.int32))


class UsedExpertsOnly(torch.autograd.Function):
    """Identity on ``weight`` that zeros the gradient of experts without rows.

    A kernel may leave it uninitialized.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, loads: Tensor) -> Tensor:
        ctx.save_for_backward(loads)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor, None]:
        (loads,) = ctx.saved_tensors
        return grads[0].masked_fill(loads[:, None, None] == 0, 0), None


def per_expert(rows: Tensor, weight: Tensor, loads: Tensor) -> Tensor:
    """Compute ``grouped`` in a loop, including experts without rows, so that they have a gradient of 0."""
    # Unbound once, because the gradient of every slice would be as large as the whole tensor.
    parts = zip(rows.split(loads.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in parts])
