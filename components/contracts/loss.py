"""Losses: pure functions of per-token statistics and a batch."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.data import SampleKind

ReferenceChoice = Literal["auto", "frozen", "adapter_off", "precomputed", "none"]
"""``stage.reference``: the source of the reference model's log-probabilities. ``auto`` is ``adapter_off`` if
the model has an adapter that can be switched off, else ``frozen``. With ``precomputed``, a cache is filled
before the first step, and the data loader attaches the log-probabilities from it to every ``Batch``."""


@dataclass(frozen=True)
class TokenStats:
    """Model outputs for a loss: float32 tensors of the shape of ``Batch.labels``.

    All except ``values`` are 0 at positions without a label. In the formulas, ``z`` are the logits over the
    vocabulary (without those of padded rows) and ``y`` is the label.
    """

    logps: Tensor
    """``z[y] - logsumexp(z)``; 0 with a scalar head, which has no logits."""
    logsumexp: Tensor | None = None
    """``logsumexp(z)``"""
    mean_logp: Tensor | None = None
    """``mean(z) - logsumexp(z)``: the mean log-probability over the vocabulary (label smoothing)."""
    log_sum_sq_probs: Tensor | None = None
    """``logsumexp(2 z) - 2 logsumexp(z)``: log of the sum of squared probabilities (WPO), without
    gradient."""
    correct: Tensor | None = None
    """1 if no logit is larger than ``z[y]``, else 0, without gradient."""
    values: Tensor | None = None
    """The output of the scalar head at every position, with or without a label."""


@dataclass(frozen=True)
class LossOutput:
    """Unnormalized sums over one micro-batch."""

    terms: Mapping[str, Tensor]
    """Scalar sums that are minimized, each divided by its own global count. The first is the main term."""
    metrics: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    """Metrics that are only reported: ``(detached sum, count)`` by name."""


class LossEngine(Protocol):
    """The methods of an engine that ``Loss.prepare`` may call."""

    @abstractmethod
    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        """Return ``TokenStats.logps`` of each micro-batch, without gradient.

        None means that this rank is not on the last pipeline stage.
        """

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Sum float64 ``values`` over data-parallel ranks, separately for each pipeline and tensor rank."""


class Loss(Protocol):
    """A pure function of ``(stats, batch)``, which therefore works in every layout."""

    kind: SampleKind
    requires: frozenset[str]
    """Statistics needed besides ``logps``: names of other fields of ``TokenStats``. With ``values`` the model
    has a scalar head instead of one over the vocabulary."""
    reference: ReferenceChoice
    """The source of the reference log-probabilities of a batch. With ``none`` a batch has none."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the number of items of ``batch`` over which each term is a mean, by the name of the term.

        The items are, for example, labels or pairs. Terms are in the order of ``LossOutput.terms``. Counts
        depend only on labels.
        """

    def weights(self, batch: Batch) -> Tensor | None:
        """Return ``w``, of the shape of ``labels``, if the loss is exactly ``-(w * logps).sum()``, else None.

        With ``w``, engines compute the gradient of the output head during the forward pass.
        """

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:
        """Return ``microbatches`` with inputs attached that need another forward pass or other ranks.

        This is a collective operation of all ranks.
        """

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput: ...
