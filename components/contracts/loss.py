"""Losses: pure functions of per-token statistics and a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.data import SampleKind

ReferenceChoice = Literal["auto", "frozen", "adapter_off", "precomputed", "none"]
"""``stage.reference``: where a reference's log-probabilities come from. ``auto``: ``adapter_off`` where there
is an adapter that can be switched off, else ``frozen``. ``precomputed``: from a cache that is filled before
the first step, whence the data loader attaches them to every ``Batch``."""


@dataclass(frozen=True)
class TokenStats:
    """What a loss may know of the model: float32 tensors like ``Batch.labels``, 0 where there is no label.

    With logits ``z`` over the vocabulary (padded rows excluded) and label ``y``.
    """

    logps: Tensor
    """``z[y] - logsumexp(z)``"""
    logsumexp: Tensor | None = None
    """``logsumexp(z)``"""
    mean_logp: Tensor | None = None
    """``mean(z) - logsumexp(z)``: the mean log-probability over the vocabulary (label smoothing)."""


@dataclass(frozen=True)
class LossOutput:
    """Un-normalised sums over one micro-batch."""

    terms: Mapping[str, Tensor]
    """Scalar sums that are minimised; each is divided by its own global count. The first is the main term."""
    metrics: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    """name -> (detached sum, count): only reported."""


class LossEngine(Protocol):
    """What ``Loss.prepare`` may use of an engine."""

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        """``TokenStats.logps`` of each micro-batch without gradient; None off the last pipeline stage."""

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Adds up float64 ``values`` over data ranks; each pipeline stage and tensor rank for itself."""


class Loss(Protocol):
    """A pure function of ``(stats, batch)``; a new loss works in every layout the day it is written."""

    kind: SampleKind
    requires: frozenset[str]
    """Statistics needed beside ``logps``: a subset of ``{"logsumexp", "mean_logp"}``."""
    reference: ReferenceChoice
    """Whose log-probabilities ``prepare`` attaches; ``none``: it attaches none, or zeros."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Per term, in the order of ``LossOutput.terms``, what its sum runs over; from labels alone."""

    def weights(self, batch: Batch) -> Tensor | None:
        """``w`` like ``labels`` if the loss is exactly ``-(w * logps).sum()``, else None.

        Engines use it to form the gradient of the output head in the forward pass.
        """

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:
        """Attaches what needs another forward pass or another rank. Every rank calls it together."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput: ...
