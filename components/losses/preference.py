"""Direct preference optimisation and its variants: pairs of answers, against a reference model."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.losses.preference_base import (
    Pairs,
    ReferencedLoss,
    check_label_smoothing,
    refuse_unread,
    sides,
    verbosity_weights,
)
from components.losses.preference_formulas import (
    F_DIVERGENCES,
    OF_THE_DIFFERENCE,
    PAIR_LOSSES,
    PER_TOKEN,
    SMOOTHED_BY_DESIGN,
    alpha_divergence,
    loss_options,
)

DPOKind = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "discopop",
]
Combined = Literal[DPOKind, "sft"]
"""Members of a list of losses. ``sft`` is the negative log-likelihood of chosen answers, a mean over
tokens."""
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True, kw_only=True)
class DPO(ReferencedLoss):
    """DPO and its variants, with the formulas in ``preference_formulas``.

    A reward is beta times an answer's log-ratio to the reference model. A list of losses means their weighted
    sum. An example is MPO (Wang et al. 2024): ``sigmoid``, ``bco_pair`` and ``sft``.
    """

    label_smoothing: float = 0.0
    loss: DPOKind | tuple[Combined, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    """Weights of a list of losses. None means 1 each."""
    wpo: bool = False
    """Whether pairs are weighted by the policy's probabilities of their tokens (WPO, Zhou et al. 2024,
    equation 2).

    The weight of an answer is the geometric mean of its tokens' probabilities, each divided by the expected
    probability of a token that the policy samples there. The weight of a pair is the product of both.
    """
    rpo_alpha: float = 0.0
    """RPO (Pang et al. 2024): weight of the chosen answers' negative log-likelihood, a mean over tokens."""
    ld_alpha: float | None = None
    """LD-DPO (Liu et al. 2024): weight of the tokens of an answer beyond the length of the shorter answer of
    the pair. None means 1."""
    f_divergence: FDivergence = "reverse_kl"
    """f-DPO (Wang et al. 2023): the divergence that keeps the policy near the reference model."""
    alpha_divergence_coef: float | None = None
    """Alpha of ``f_divergence=alpha_divergence``. None means 0.5."""
    discopop_tau: float | None = None
    """Temperature of ``loss=discopop``. None means 0.05."""

    nll_option: ClassVar[str] = "rpo_alpha"

    def __post_init__(self) -> None:
        self._check_list()
        super().__post_init__()
        self._check_label_smoothing()
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"stage.ld_alpha: must be from 0 to 1, got {self.ld_alpha}.")
        if self.discopop_tau is not None:
            refuse_unread("discopop_tau", "loss", self.losses, readers("discopop_tau"))
            if not 0 < self.discopop_tau < math.inf:
                raise ConfigError(f"stage.discopop_tau: must be a number above 0, got {self.discopop_tau}.")
        self._check_divergence()

    @property
    def kinds(self) -> tuple[Combined, ...]:
        return (self.loss,) if isinstance(self.loss, str) else self.loss

    @property
    def losses(self) -> list[str]:
        """The names in ``loss`` that are preference losses: all except ``sft``."""
        return [kind for kind in self.kinds if kind != "sft"]

    def _weighted(self) -> list[tuple[str, float]]:
        return list(zip(self.kinds, self.loss_weights or [1.0] * len(self.kinds), strict=True))

    def _check_list(self) -> None:
        """Raise ConfigError unless ``loss``, ``loss_weights``, ``rpo_alpha`` and ``wpo`` fit together."""
        kinds, weights = self.kinds, self.loss_weights
        if not self.losses:
            raise ConfigError("stage.loss: the list has no preference loss; add one, or use stage=sft.")
        if weights is not None and (isinstance(self.loss, str) or len(weights) != len(kinds)):
            raise ConfigError(
                f"stage.loss_weights: are {len(weights)}, for {len(kinds)} of stage.loss; give a list of "
                "losses, and a weight for each."
            )
        if weights is not None and not all(0 < weight < math.inf for weight in weights):
            raise ConfigError(f"stage.loss_weights: must be numbers above 0, got {list(weights)}.")
        if self.rpo_alpha and "sft" in kinds:
            raise ConfigError("stage.rpo_alpha: adds the same term as sft in stage.loss; leave one out.")
        if self.wpo and (self.rpo_alpha or "sft" in kinds):
            raise ConfigError(
                "stage.wpo: weights pairs, not a likelihood (stage.rpo_alpha, sft); leave one out."
            )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"log_sum_sq_probs"} if self.wpo else ())

    def _check_label_smoothing(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if self.label_smoothing:
            refuse_unread("label_smoothing", "loss", self.losses, readers("label_smoothing"))
        elif "exo_pair" in self.losses:
            raise ConfigError(
                "stage.label_smoothing: stage.loss=exo_pair takes its logarithm; "
                "set it above 0, as stage.label_smoothing=1e-3."
            )

    def _check_divergence(self) -> None:
        kind, coefficient = self.f_divergence, self.alpha_divergence_coef
        others = [loss for loss in self.losses if loss not in OF_THE_DIFFERENCE]
        if kind != "reverse_kl" and others:
            raise ConfigError(
                f"stage.f_divergence: {kind} needs a loss of the difference of two scores, but "
                f"stage.loss={others[0]} is none; use one of {', '.join(sorted(OF_THE_DIFFERENCE))}."
            )
        if kind != "reverse_kl" and self.reference == "none":
            raise ConfigError(
                f"stage.f_divergence: {kind} needs a reference, but stage.reference=none; leave one out."
            )
        if coefficient is None:
            return
        refuse_unread("alpha_divergence_coef", "f_divergence", [kind], ["alpha_divergence"])
        if not math.isfinite(coefficient):
            raise ConfigError(f"stage.alpha_divergence_coef: must be a number, got {coefficient}.")

    @property
    def nll_weight(self) -> float:
        return self.rpo_alpha + sum(weight for kind, weight in self._weighted() if kind == "sft")

    def token_scores(self, stats: TokenStats, batch: Batch) -> Tensor:
        ratios = super().token_scores(stats, batch)
        return ratios if self.ld_alpha is None else verbosity_weights(batch, self.ld_alpha) * ratios

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        found = super().pairs(stats, batch)
        if stats.log_sum_sq_probs is None:
            return found
        aligned = batch.sum_per_sequence(stats.logps.detach() - stats.log_sum_sq_probs)
        likely = (aligned / batch.sum_per_sequence(batch.labels != IGNORE).clamp(min=1)).exp()
        chosen, rejected = sides(likely, batch)
        return replace(found, weights=chosen * rejected)

    def pair_loss(self, pairs: Pairs) -> Tensor:
        pairs = replace(pairs, chosen=self._diverge(pairs.chosen), rejected=self._diverge(pairs.rejected))
        losses = [weight * self._loss_of(kind, pairs) for kind, weight in self._weighted() if kind != "sft"]
        total = torch.stack(losses).sum(0)
        return total if pairs.weights is None else pairs.weights * total

    def _loss_of(self, kind: str, pairs: Pairs) -> Tensor:
        if kind in PER_TOKEN:
            pairs = pairs.per_token()
        loss = PAIR_LOSSES[kind]
        is_smoothed = kind in SMOOTHED_BY_DESIGN or SMOOTHED_BY_DESIGN.isdisjoint(self.losses)
        smoothing = self.label_smoothing if is_smoothed else 0.0
        known = {"label_smoothing": smoothing, "discopop_tau": self.discopop_tau or 0.05}
        options = {name: known[name] for name in loss_options(loss)}
        return loss(pairs.chosen, pairs.rejected, beta=self.beta, **options)

    def _diverge(self, log_ratio: Tensor) -> Tensor:
        if self.f_divergence == "alpha_divergence":
            coefficient = self.alpha_divergence_coef
            return alpha_divergence(log_ratio, 0.5 if coefficient is None else coefficient)
        return F_DIVERGENCES[self.f_divergence](log_ratio)


def readers(option: str) -> list[str]:
    """Return the losses that read ``option``."""
    return [name for name, function in PAIR_LOSSES.items() if option in loss_options(function)]
