"""Cross entropy with the next token: pre-training and supervised fine-tuning."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import ConfigError, check_at_least_zero
from components.contracts.loss import LossEngine, LossOutput, ReferenceChoice, TokenStats


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """``(1 - eps) * -logp + eps * -mean_logp + z_loss * logsumexp ** 2`` at every labelled token.

    Label smoothing is that of Szegedy et al. 2016 (uniform over the whole vocabulary), the z-loss that of
    PaLM (2022).
    """

    kind: Literal["text", "chat"] = "text"
    normalize: Literal["token", "sequence"] = "token"
    """The unit over which the loss is a mean: labelled tokens, or sequences (each with the mean over its
    labelled tokens)."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    token_accuracy: bool = False
    """Whether the share of labelled tokens with the largest logit of the vocabulary is reported."""

    reference: ClassVar[ReferenceChoice] = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"stage.label_smoothing: must be at least 0 and below 1, got {self.label_smoothing}."
            )
        check_at_least_zero("stage", self, "z_loss")

    @property
    def requires(self) -> frozenset[str]:
        wanted = {"mean_logp": self.label_smoothing, "logsumexp": self.z_loss, "correct": self.token_accuracy}
        return frozenset(name for name, strength in wanted.items() if strength)

    @property
    def _is_nll(self) -> bool:
        """Whether the loss has no term besides the negative log-likelihood."""
        return not self.label_smoothing and not self.z_loss

    def counts(self, batch: Batch) -> dict[str, int]:
        if self.normalize == "token":
            return {"loss": len(batch.labelled())}
        return {"loss": int((batch.sum_per_sequence(batch.labels != IGNORE) > 0).sum())}

    def weights(self, batch: Batch) -> Tensor | None:
        return self.token_weights(batch) if self._is_nll else None

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:  # noqa: ARG002
        return microbatches

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        nll, eps, metrics = -stats.logps, self.label_smoothing, {}
        per_token = nll
        if not self._is_nll:
            metrics["nll"] = nll
        if stats.mean_logp is not None:
            per_token = (1 - eps) * per_token - eps * stats.mean_logp
        if stats.logsumexp is not None:
            metrics["z_loss"] = self.z_loss * stats.logsumexp.square()
            per_token = per_token + metrics["z_loss"]
        if stats.correct is not None:
            metrics["token_accuracy"] = stats.correct
        total = (self.token_weights(batch) * per_token).sum(dtype=torch.float64)
        tokens = len(batch.labelled())
        return LossOutput(
            {"loss": total},
            {name: (value.detach().sum(dtype=torch.float64), tokens) for name, value in metrics.items()},
        )

    def token_weights(self, batch: Batch) -> Tensor:
        """Return the weight of each position in the loss, float32 in the shape of ``labels``.

        It is 1 with ``normalize=token``, and 1 / (number of labels of the sequence) with
        ``normalize=sequence``. Positions without a label have weight 0.
        """
        labelled = batch.labels != IGNORE
        if self.normalize == "token":
            return labelled.float()
        lengths = batch.sum_per_sequence(labelled).clamp(min=1)
        return (labelled / lengths[batch.sequence_ids()]).float()
