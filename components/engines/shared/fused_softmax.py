"""The softmax of the logits and its gradient in two GPU kernels, which torch.compile generates.

In eager mode, the logits of a chunk would be read and written about ten times, mostly in fp32. Here they stay
in their own dtype, are read for the sums, and are then replaced by their gradient.
"""

import math

import torch
from torch import Tensor

from components.engines.shared import generated_kernels


def stats_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of statistics of ``tensor``: its own, but at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row maxima of ``logits [n, V]``, and row sums of exp(z - max), of its square and of z.

    All are ``[n]`` in at least fp32. If V is 0, the maxima are -inf.
    """
    if not logits.shape[1]:
        none = logits.new_zeros(len(logits), dtype=stats_dtype(logits))
        return none - math.inf, none, none, none
    sums: tuple[Tensor, Tensor, Tensor, Tensor] = generated_kernels.compiled(_row_sums)(logits)
    return sums


def write_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    of_softmax: Tensor,
    columns: Tensor,
    of_column: Tensor,
    of_all: Tensor | None = None,
) -> None:
    """Replace ``logits [n, V]`` by ``of_softmax * softmax + of_column * onehot(columns) + of_all``, in place.

    The other tensors are ``[n]``. For a column outside of 0 to V - 1, the one-hot row is all zeros. The sum
    is computed in at least fp32 and rounded once, to the dtype of ``logits``.
    """
    if logits.shape[1]:
        generated_kernels.compiled(_write_gradient)(logits, logsumexp, of_softmax, columns, of_column, of_all)


def _row_sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = logits.to(stats_dtype(logits))
    largest = values.amax(-1)
    powers = (values - largest[:, None]).exp()
    return largest, powers.sum(-1), powers.square().sum(-1), values.sum(-1)


def _write_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    of_softmax: Tensor,
    columns: Tensor,
    of_column: Tensor,
    of_all: Tensor | None,
) -> None:
    values = logits.to(logsumexp.dtype)
    gradient = (values - logsumexp[:, None]).exp() * of_softmax[:, None]
    here = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    gradient = gradient + torch.where(here, of_column[:, None], 0)
    logits.copy_(gradient if of_all is None else gradient + of_all[:, None])
