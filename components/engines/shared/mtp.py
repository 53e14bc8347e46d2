"""The losses of multi-token prediction beside the loss of a train step; both engines add them here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.loss import LossOutput, TokenStats
from components.models.mtp import MTPConfig


@dataclass(frozen=True)
class TokenStatsWithMTP(TokenStats):
    """Also of further tokens."""

    mtp: tuple[Tensor, ...] = ()
    """``logps`` by depth; none outside of training."""


def add_mtp_losses(
    output: LossOutput,
    counts: Mapping[str, int],
    terms: MTPConfig,
    batches: Sequence[Batch],
    logps: Sequence[Tensor],
) -> tuple[LossOutput, dict[str, int]]:
    """``output`` with the term of every depth, and ``counts`` with theirs.

    Args:
        batches: ``terms.batches`` of the micro-batch, in host memory.
        logps: ``TokenStats.logps`` of each depth, of whole rows.

    Returns:
        In the terms each sum has its coefficient; in the metrics, under the same name, it has none.
    """
    if not terms.num_layers:
        return output, dict(counts)
    sums = {n: -found.sum(dtype=torch.float64) for n, found in zip(terms.loss_names, logps, strict=True)}
    added = {n: len(ahead.labelled()) for n, ahead in zip(terms.loss_names, batches, strict=True)}
    reported = {name: (value.detach(), added[name]) for name, value in sums.items()}
    weighed = {name: terms.coefficient * value for name, value in sums.items()}
    whole = LossOutput({**output.terms, **weighed}, {**output.metrics, **reported})
    return whole, {**counts, **added}
