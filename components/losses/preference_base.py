"""Base classes of losses over pairs of answers, one chosen and one rejected."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.device_copy import to_device
from components.contracts.errors import ConfigError
from components.contracts.loss import LossEngine, LossOutput, ReferenceChoice, TokenStats


@dataclass(frozen=True)
class Pairs:
    """The answers of a micro-batch, float64 ``[pairs]`` each."""

    chosen: Tensor
    """Scores: log-ratios, or log-probabilities if no reference model is used."""
    rejected: Tensor
    chosen_tokens: Tensor
    """Number of labels of each answer."""
    rejected_tokens: Tensor
    weights: Tensor | None = None
    """Weight of each pair in the loss, without gradient. None means 1."""

    def per_token(self) -> "Pairs":
        """Return these pairs with every score divided by the number of labels of its answer."""
        return replace(
            self, chosen=self.chosen / self.chosen_tokens, rejected=self.rejected / self.rejected_tokens
        )


@dataclass(frozen=True, kw_only=True)
class PairwiseLoss(ABC):
    """A sum of ``pair_loss`` over pairs and, if ``nll_weight`` is not 0, a second term.

    The second term is ``nll_weight`` times the negative log-likelihood of the chosen answers; its count is
    the number of their labels. Metrics, those of TRL, are rewards and log-probabilities of the answers,
    the margin between rewards, and the share of pairs with a margin above 0.
    """

    beta: float = 0.1

    kind: ClassVar[Literal["preference"]] = "preference"

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"stage.beta: must be a number above 0, got {self.beta}.")
        if not 0 <= self.nll_weight < math.inf:
            raise ConfigError(
                f"stage.{self.nll_option}: must be a number of at least 0, got {self.nll_weight}."
            )

    @abstractmethod
    def pair_loss(self, pairs: Pairs) -> Tensor:
        """Return the loss of each pair, float64 ``[pairs]``."""

    nll_option: ClassVar[str] = "nll_weight"
    """Name of the option that sets ``nll_weight``."""

    @property
    def nll_weight(self) -> float:
        return 0.0

    @property
    def requires(self) -> frozenset[str]:
        return frozenset()

    def token_scores(self, stats: TokenStats, batch: Batch) -> Tensor:  # noqa: ARG002
        """Return the contribution of each token to the score of its answer, in the shape of ``labels``.

        The dtype is float32 or float64.
        """
        return stats.logps

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        scores = batch.sum_per_sequence(self.token_scores(stats, batch))
        tokens = batch.sum_per_sequence(batch.labels != IGNORE)
        return Pairs(*sides(scores, batch), *sides(tokens, batch))

    def answer_logps(self, pairs: Pairs, stats: TokenStats, batch: Batch) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the log-probabilities of chosen and of rejected answers, for metrics.

        By default they are the scores of the answers.
        """
        return pairs.chosen, pairs.rejected

    def counts(self, batch: Batch) -> dict[str, int]:
        counts = {"loss": len(pair_indices(batch)[0])}
        if self.nll_weight:
            counts["nll"] = int((is_chosen(batch) & (batch.labels != IGNORE)).sum())
        return counts

    def weights(self, batch: Batch) -> Tensor | None:  # noqa: ARG002
        return None

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:  # noqa: ARG002
        return microbatches

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        pairs = self.pairs(stats, batch)
        terms = {"loss": self.pair_loss(pairs).sum()}
        if self.nll_weight:
            nll = -(stats.logps * is_chosen(batch)).sum(dtype=torch.float64)
            terms["nll"] = self.nll_weight * nll
        chosen, rejected = self.beta * pairs.chosen, self.beta * pairs.rejected
        logps = self.answer_logps(pairs, stats, batch)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).double(),
            "logps/chosen": logps[0],
            "logps/rejected": logps[1],
        }
        return LossOutput(terms, {k: (v.detach().sum(), v.numel()) for k, v in metrics.items()})


def check_label_smoothing(share: float) -> None:
    """Raise ConfigError if ``share``, that of the preferences assumed to be reversed, is out of range."""
    if not 0 <= share < 0.5:
        raise ConfigError(
            f"stage.label_smoothing: must be at least 0 and below 0.5 (at 0.5 nothing is preferred), "
            f"got {share}."
        )


def refuse_unread(option: str, key: str, chosen: Sequence[str], readers: Sequence[str]) -> None:
    """Raise ConfigError if only values of ``key`` other than ``chosen``, the ``readers``, read ``option``."""
    if not {*chosen} & {*readers}:
        raise ConfigError(
            f"stage.{option}: stage.{key}={','.join(chosen)} does not read it; "
            f"remove it, or use stage.{key}={' or '.join(readers)}."
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
    """The reference model of a loss. ``reference=none`` means reference log-probabilities of 0."""

    reference: ReferenceChoice = "auto"
    reference_path: str | None = None
    """Folder or hub id of another model that is the reference. None means the model before training."""
    sync_reference_every: int = 0
    """TR-DPO (Gorbatovski et al. 2024): number of steps from one update of the reference to the next.

    An update replaces the reference by a mixture of itself and the trained model. 0 means no updates.
    """
    sync_reference_mixup: float | None = None
    """Share of the trained model in the mixture. None means 0.6."""

    def check_sync(self) -> None:
        every, mixup = self.sync_reference_every, self.sync_reference_mixup
        if every < 0:
            raise ConfigError(f"stage.sync_reference_every: must be at least 0, got {every}.")
        if mixup is not None and not every:
            raise ConfigError(
                "stage.sync_reference_mixup: is read with stage.sync_reference_every only; set both."
            )
        if mixup is not None and not 0 < mixup <= 1:
            raise ConfigError(f"stage.sync_reference_mixup: must be above 0 and at most 1, got {mixup}.")


@dataclass(frozen=True, kw_only=True)
class ReferencedLoss(PairwiseLoss, ReferenceOptions):
    """A loss of log-ratios to a reference model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_sync()

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:
        return attach_reference(microbatches, engine, self.reference)

    def token_scores(self, stats: TokenStats, batch: Batch) -> Tensor:
        return log_ratios(stats, batch, self.reference)

    def answer_logps(self, pairs: Pairs, stats: TokenStats, batch: Batch) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return sides(batch.sum_per_sequence(stats.logps), batch)


def attach_reference(
    microbatches: Sequence[Batch], engine: LossEngine, reference: ReferenceChoice
) -> Sequence[Batch]:
    """Return the batches with ``ref_logps``.

    The batches are returned unchanged if all of them already have ``ref_logps``, if ``reference`` is
    ``none``, or if this rank is not on the last pipeline stage.
    """
    if reference == "none" or all(batch.ref_logps is not None for batch in microbatches):
        return microbatches
    logps = engine.logps(microbatches, reference=True)
    if logps is None:
        return microbatches
    return [replace(batch, ref_logps=ref) for batch, ref in zip(microbatches, logps, strict=True)]


def log_ratios(stats: TokenStats, batch: Batch, reference: ReferenceChoice) -> Tensor:
    """Return the log-ratios to the reference model per token, float32 in the shape of ``labels``.

    Differences are taken per token, because two sums over an answer are large and nearly equal. Without a
    reference model (``none``), the log-probabilities themselves are returned.
    """
    if reference == "none":
        return stats.logps
    assert batch.ref_logps is not None, "prepare() attaches the reference's log-probabilities"
    return stats.logps - batch.ref_logps


def pair_indices(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices of chosen and of rejected sequences, pair by pair: int64 ``[pairs]`` each."""
    assert batch.pair_index is not None, "preference data carries pair_index"
    order = batch.pair_index.argsort()
    order = order[batch.pair_index[order] >= 0]
    chosen, rejected = order[0::2], order[1::2]
    ids = batch.pair_index[order].tolist()
    whole = all(index % 2 == 0 for index in ids[0::2]) and [i + 1 for i in ids[0::2]] == ids[1::2]
    assert whole, f"a pair is split over micro-batches: {ids}"
    return chosen, rejected


def sides(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the entries of ``values [S]`` of chosen and of rejected sequences, pair by pair."""
    chosen, rejected = (to_device(side, values.device) for side in pair_indices(batch))
    return values[chosen], values[rejected]


def is_chosen(batch: Batch) -> Tensor:
    """Return whether each position belongs to a chosen sequence, bool in the shape of ``labels``."""
    assert batch.pair_index is not None, "preference data carries pair_index"
    chosen = batch.pair_index % 2 == 0  # false for -1
    return to_device(chosen, batch.labels.device)[batch.sequence_ids()]


def verbosity_weights(batch: Batch, ld_alpha: float) -> Tensor:
    """Return the weights of LD-DPO (Liu et al. 2024, equation 12), float64 in the shape of ``labels``.

    Labels of an answer up to the length of the shorter answer of its pair have the weight 1, later labels
    ``ld_alpha``.
    """
    labelled = batch.labels != IGNORE
    lengths = batch.sum_per_sequence(labelled)
    shorter = lengths.clone()
    chosen, rejected = (to_device(side, lengths.device) for side in pair_indices(batch))
    for side in (chosen, rejected):
        shorter[side] = torch.minimum(lengths[chosen], lengths[rejected])
    sequences = batch.sequence_ids()
    # In integers, because torch refuses cumsum of floating-point numbers on a GPU with run.deterministic.
    numbers = lengths.long()
    before = (numbers.cumsum(0) - numbers)[sequences]  # number of labels in all earlier sequences
    place = labelled.reshape(-1).cumsum(0).view_as(batch.labels) - before
    return torch.where(place <= shorter[sequences], 1.0, ld_alpha).double()
