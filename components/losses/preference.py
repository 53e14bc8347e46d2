"""Direct preference optimisation and its variants: pairs of answers, against a reference model."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.losses.preference_base import Pairs, ReferencedLoss, check_label_smoothing, verbosity_weights
from components.losses.preference_formulas import (
    F_DIVERGENCES,
    OF_THE_DIFFERENCE,
    PAIR_LOSSES,
    PER_TOKEN,
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
FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True, kw_only=True)
class DPO(ReferencedLoss):
    """DPO and its variants, with the formulas in ``preference_formulas``.

    A reward is beta times an answer's log-ratio to the reference model.
    """

    label_smoothing: float = 0.0
    loss: DPOKind = "sigmoid"
    rpo_alpha: float = 0.0
    """RPO (Pang et al. 2024): weight of the chosen answers' negative log-likelihood, a mean over tokens."""
    ld_alpha: float | None = None
    """LD-DPO (Liu et al. 2024): weight of the excess tokens of the longer answer. None means 1."""
    f_divergence: FDivergence = "reverse_kl"
    """f-DPO (Wang et al. 2023): the divergence that keeps the policy near the reference model."""
    alpha_divergence_coef: float | None = None
    """Alpha of ``f_divergence=alpha_divergence``. None means 0.5."""
    discopop_tau: float | None = None
    """Temperature of ``loss=discopop``. None means 0.05."""

    nll_option: ClassVar[str] = "rpo_alpha"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_label_smoothing()
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ConfigError(f"stage.ld_alpha: must be from 0 to 1, got {self.ld_alpha}.")
        if self.discopop_tau is not None:
            refuse_unread("discopop_tau", self.loss)
            if not 0 < self.discopop_tau < math.inf:
                raise ConfigError(f"stage.discopop_tau: must be a number above 0, got {self.discopop_tau}.")
        self._check_divergence()

    def _check_label_smoothing(self) -> None:
        check_label_smoothing(self.label_smoothing)
        if self.label_smoothing:
            refuse_unread("label_smoothing", self.loss)
        elif self.loss == "exo_pair":
            raise ConfigError(
                "stage.label_smoothing: stage.loss=exo_pair takes its logarithm; "
                "set it above 0, as stage.label_smoothing=1e-3."
            )

    def _check_divergence(self) -> None:
        kind, coefficient = self.f_divergence, self.alpha_divergence_coef
        if kind != "reverse_kl" and self.loss not in OF_THE_DIFFERENCE:
            raise ConfigError(
                f"stage.f_divergence: {kind} needs a loss of the difference of two scores, but "
                f"stage.loss={self.loss} is none; use one of {', '.join(sorted(OF_THE_DIFFERENCE))}."
            )
        if kind != "reverse_kl" and self.reference == "none":
            raise ConfigError(
                f"stage.f_divergence: {kind} needs a reference, but stage.reference=none; leave one out."
            )
        if coefficient is None:
            return
        if kind != "alpha_divergence":
            raise ConfigError(
                f"stage.alpha_divergence_coef: stage.f_divergence={kind} does not read it; "
                "remove it, or use stage.f_divergence=alpha_divergence."
            )
        if not math.isfinite(coefficient):
            raise ConfigError(f"stage.alpha_divergence_coef: must be a number, got {coefficient}.")

    @property
    def nll_weight(self) -> float:
        return self.rpo_alpha

    def token_scores(self, stats: TokenStats, batch: Batch) -> Tensor:
        ratios = super().token_scores(stats, batch)
        return ratios if self.ld_alpha is None else verbosity_weights(batch, self.ld_alpha) * ratios

    def pair_loss(self, pairs: Pairs) -> Tensor:
        pairs = replace(pairs, chosen=self._diverge(pairs.chosen), rejected=self._diverge(pairs.rejected))
        if self.loss in PER_TOKEN:
            pairs = pairs.per_token()
        loss = PAIR_LOSSES[self.loss]
        known = {"label_smoothing": self.label_smoothing, "discopop_tau": self.discopop_tau or 0.05}
        options = {name: known[name] for name in loss_options(loss)}
        return loss(pairs.chosen, pairs.rejected, beta=self.beta, **options)

    def _diverge(self, log_ratio: Tensor) -> Tensor:
        if self.f_divergence == "alpha_divergence":
            coefficient = self.alpha_divergence_coef
            return alpha_divergence(log_ratio, 0.5 if coefficient is None else coefficient)
        return F_DIVERGENCES[self.f_divergence](log_ratio)


def refuse_unread(option: str, loss: str) -> None:
    """Raise ConfigError if ``loss`` does not read ``option``."""
    readers = [name for name, function in PAIR_LOSSES.items() if option in loss_options(function)]
    if loss not in readers:
        raise ConfigError(
            f"stage.{option}: stage.loss={loss} does not read it; "
            f"remove it, or use stage.loss={' or '.join(readers)}."
        )
