"""The losses of multi-token prediction (MTP), which both engines add to the loss of a train step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.loss import LossOutput, TokenStats
from components.models.mtp import MTPConfig


@dataclass(frozen=True)
class TokenStatsWithMTP(TokenStats):
    """Token statistics with the log-probabilities of multi-token prediction."""

    mtp: tuple[Tensor, ...] = ()
    """``logps`` by MTP depth, empty outside of training."""


def add_mtp_losses(
    output: LossOutput,
    counts: Mapping[str, int],
    terms: MTPConfig,
    batches: Sequence[Batch],
    logps: Sequence[Tensor],
) -> tuple[LossOutput, dict[str, int]]:
    """Add the term of every MTP depth to ``output``, and its count to ``counts``.

    Args:
        batches: ``terms.batches`` of the micro-batch, in host memory.
        logps: ``TokenStats.logps`` of each depth, for whole rows.

    Returns:
        the extended output and counts. A term is multiplied by its coefficient, but its metric is not.
    """
    if not terms.num_layers:
        return output, dict(counts)
    sums = {n: -found.sum(dtype=torch.float64) for n, found in zip(terms.loss_names, logps, strict=True)}
    added = {n: len(ahead.labelled()) for n, ahead in zip(terms.loss_names, batches, strict=True)}
    reported = {name: (value.detach(), added[name]) for name, value in sums.items()}
    weighed = {name: terms.coefficient * value for name, value in sums.items()}
    whole = LossOutput({**output.terms, **weighed}, {**output.metrics, **reported})
    return whole, {**counts, **added}
