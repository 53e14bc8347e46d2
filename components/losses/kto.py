"""Losses over single answers, each desirable or not, against a reference model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from components.contracts.batch import DESIRABLE, KL_COMPLETION, UNDESIRABLE, Batch
from components.contracts.device_copy import to_device
from components.contracts.errors import ConfigError, check_at_least_zero
from components.contracts.loss import LossEngine, LossOutput, TokenStats
from components.losses.preference_base import ReferenceOptions, attach_reference, log_ratios


@dataclass(frozen=True, kw_only=True)
class KTO(ReferenceOptions):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, equations 7 and 8).

    With r = beta * log-ratio and z = beta * KL, the loss of a desirable answer is ``w_d * sigmoid(z - r)``
    and that of an undesirable one ``w_u * sigmoid(r - z)``.

    KL is the mean log-ratio of mismatched answers over the global batch, clamped to at least 0, without
    gradient. ``apo_zero_unpaired`` sets z = 0 (D'Oosterlinck et al. 2024, equation 7, separately for each
    answer).
    """

    beta: float = 0.1
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    kind: ClassVar[Literal["unpaired"]] = "unpaired"
    requires: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        self.check_sync()
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"stage.beta: must be a number above 0, got {self.beta}.")
        check_at_least_zero("stage", self, "desirable_weight", "undesirable_weight")

    @property
    def has_mismatched_answers(self) -> bool:
        """Whether each step also needs the log-probabilities of mismatched answers."""
        return self.loss == "kto"

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": sum(len(sequences_with_label(batch, label)) for label in (DESIRABLE, UNDESIRABLE))}

    def weights(self, batch: Batch) -> Tensor | None:  # noqa: ARG002
        return None

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:
        """Remove the mismatched answers; attach the reference's log-probabilities and the constant ``kl``."""
        with_reference = attach_reference(microbatches, engine, self.reference)
        kl = self._kl(with_reference, engine) if self.has_mismatched_answers else 0.0
        answers = [batch.select(sequence_labels(batch) != KL_COMPLETION) for batch in with_reference]
        return [replace(batch, constants={**batch.constants, "kl": kl}) for batch in answers]

    def _kl(self, microbatches: Sequence[Batch], engine: LossEngine) -> float:
        """Return KL on the last pipeline stage, and 0 on the other stages, which compute no loss."""
        mismatched = [batch.select(sequence_labels(batch) == KL_COMPLETION) for batch in microbatches]
        found = engine.logps(mismatched)
        total = 0.0
        if found is not None:
            policy = zip(mismatched, found, strict=True)
            # Cached log-probabilities are on the host with the data, those of the engine on its device.
            ratios = [
                log_ratios(TokenStats(logps), batch.to(logps.device), self.reference)
                for batch, logps in policy
            ]
            total = torch.stack([ratio.double().sum() for ratio in ratios]).sum().item()
        count = sum(int((batch.seqlens > 0).sum()) for batch in mismatched)
        total, answers = engine.sum_over_data([total, count])
        return max(total / max(answers, 1), 0.0)

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        log_ratio = batch.sum_per_sequence(log_ratios(stats, batch, self.reference))
        logps = batch.sum_per_sequence(stats.logps.detach())
        sides = [
            to_device(sequences_with_label(batch, label), logps.device) for label in (DESIRABLE, UNDESIRABLE)
        ]
        good, bad = (log_ratio[side] for side in sides)
        kl = batch.constants["kl"]
        loss = self.desirable_weight * torch.sigmoid(self.beta * (kl - good)).sum()
        loss = loss + self.undesirable_weight * torch.sigmoid(self.beta * (bad - kl)).sum()
        count = good.numel() + bad.numel()
        metrics = {
            "rewards/chosen": (self.beta * good.detach().sum(), good.numel()),
            "rewards/rejected": (self.beta * bad.detach().sum(), bad.numel()),
        }
        metrics |= {
            f"logps/{name}": (logps[side].sum(), len(side))
            for name, side in zip(("chosen", "rejected"), sides, strict=True)
        }
        if self.has_mismatched_answers:
            metrics["kl"] = log_ratio.new_full((), kl * count), count
        return LossOutput({"loss": loss}, metrics)


def sequence_labels(batch: Batch) -> Tensor:
    assert batch.sequence_labels is not None, "unpaired data carries sequence_labels"
    return batch.sequence_labels


def sequences_with_label(batch: Batch, label: int) -> Tensor:
    """Return the indices of the sequences with ``label``: int64 ``[n]``, on the host."""
    return (sequence_labels(batch) == label).nonzero()[:, 0]
