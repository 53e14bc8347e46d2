"""Products of the rows of several experts with their matrices, in one kernel or in a loop."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

ALIGNED = 8
"""Sizes in grouped bf16 matrix products must be multiples of this."""


def has_grouped_kernel(rows: Tensor, outputs: int) -> bool:
    """Return whether torch has a grouped kernel for ``rows`` ``[N, in]`` and matrices ``[outputs, in]``.

    On GPUs whose compute capability is not 9.x or 10.x, torch copies the loads to the host and multiplies in
    a loop.
    """
    fits = rows.shape[1] % ALIGNED == 0 and outputs % ALIGNED == 0 and len(rows) > 0
    if not (rows.is_cuda and rows.dtype == torch.bfloat16 and fits):
        return False
    return torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def grouped_matmul(rows: Tensor, weight: Tensor, loads: Tensor) -> Tensor:
    """Multiply the rows of each expert e, ``loads[e]`` consecutive ones, by ``weight[e]``.

    ``rows`` is ``[N, in]``, ``weight`` ``[E, out, in]`` and the result ``[N, out]``. The host does not wait
    for ``loads``.
    """
    visited = UsedExpertsOnly.apply(weight, loads)
    return F.grouped_mm(rows, visited.transpose(1, 2), offs=loads.cumsum(0, dtype=torch.int32))


class UsedExpertsOnly(torch.autograd.Function):
    """Identity on ``weight`` that zeros the gradient of experts without rows.

    The kernel may leave that gradient uninitialized.
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
    """Compute the products of ``grouped_matmul`` in a loop over the experts.

    The matrix of an expert without rows has a gradient of 0. The host waits for ``loads``.
    """
    product: Tensor = PerExpert.apply(rows, weight, loads.tolist())
    return product


class PerExpert(torch.autograd.Function):
    """The products of ``per_expert``, written directly into the whole result or gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, loads: list[int]) -> Tensor:
        of_rows, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows else None)
        ctx.loads = loads
        out = rows.new_empty(len(rows), weight.shape[1])
        for own, matrix, product in zip(rows.split(loads), weight, out.split(loads), strict=True):
            torch.mm(own, matrix.t(), out=product)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, weight), grad = ctx.saved_tensors, grads[0].contiguous()
        parts, of_rows, of_weight = grad.split(ctx.loads), None, None
        if weight is not None:
            of_rows = grad.new_empty(len(grad), weight.shape[2])
            for own, matrix, product in zip(parts, weight, of_rows.split(ctx.loads), strict=True):
                torch.mm(own, matrix, out=product)
        if rows is not None:
            of_weight = grad.new_empty(len(parts), grad.shape[1], rows.shape[1])
            for own, given, product in zip(parts, rows.split(ctx.loads), of_weight, strict=True):
                torch.mm(own.t(), given, out=product)
        return of_rows, of_weight, None
