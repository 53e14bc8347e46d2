"""Preference losses that need no reference model."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.errors import check_at_least_zero
from components.contracts.loss import ReferenceChoice, TokenStats
from components.losses.preference_base import Pairs, PairwiseLoss, check_label_smoothing, refuse_unread
from components.losses.preference_formulas import hinge, ipo, sigmoid


@dataclass(frozen=True, kw_only=True)
class CPO(PairwiseLoss):
    """Contrastive preference optimisation (Xu et al. 2024, equations 3 and 5) and SimPO.

    SimPO (Meng et al. 2024, equation 6) divides log-probabilities by the number of tokens, and has a margin
    gamma between rewards. ``ipo`` also divides by the number of tokens, as in TRL's CPOTrainer.
    """

    loss: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    cpo_alpha: float = 1.0
    """Weight of the chosen answer's negative log-likelihood."""
    simpo_gamma: float | None = None
    """Target difference of the rewards with ``loss=simpo``. None means 0.5."""
    label_smoothing: float = 0.0

    reference: ClassVar[ReferenceChoice] = "none"
    nll_option: ClassVar[str] = "cpo_alpha"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)
        if self.label_smoothing:
            refuse_unread("label_smoothing", "loss", [self.loss], ["sigmoid", "simpo"])
        if self.simpo_gamma is not None:
            refuse_unread("simpo_gamma", "loss", [self.loss], ["simpo"])
            check_at_least_zero("stage", self, "simpo_gamma")

    @property
    def nll_weight(self) -> float:
        return self.cpo_alpha

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        found = super().pairs(stats, batch)
        return found.per_token() if self.loss in ("ipo", "simpo") else found

    def pair_loss(self, pairs: Pairs) -> Tensor:
        chosen, rejected, beta = pairs.chosen, pairs.rejected, self.beta
        if self.loss == "hinge":
            return hinge(chosen, rejected, beta=beta)
        if self.loss == "ipo":
            return ipo(chosen, rejected, beta=beta)
        if self.loss == "simpo":
            chosen = chosen - (0.5 if self.simpo_gamma is None else self.simpo_gamma) / beta
        return sigmoid(chosen, rejected, beta=beta, label_smoothing=self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class ORPO(PairwiseLoss):
    """Odds-ratio preference optimisation (Hong et al. 2024, equations 4 to 7); beta is its lambda.

    The loss is the negative log-likelihood of the chosen answer, plus beta times the negative logsigmoid of
    the difference in log odds between the chosen and the rejected answer. The likelihood of a sequence is the
    geometric mean over its tokens. The negative log-likelihood is a separate term over the labels of the
    answer, with weight 1.
    """

    reference: ClassVar[ReferenceChoice] = "none"

    @property
    def nll_weight(self) -> float:
        return 1.0

    def pairs(self, stats: TokenStats, batch: Batch) -> Pairs:
        return super().pairs(stats, batch).per_token()

    def pair_loss(self, pairs: Pairs) -> Tensor:
        return -self.beta * F.logsigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))


def log_odds(log_probability: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))``, exact both near p = 1 and near p = 0 (Mächler 2012).

    If p is 1 in float64, as for an answer that the model repeats, it is that of the next smaller p, and the
    gradient is 0 instead of infinite.
    """
    log_probability = log_probability.clamp(max=-torch.finfo(torch.float64).eps)
    near_one = log_probability > -math.log(2)
    # Each branch gets only values at which its gradient is finite, even if it is not selected.
    large = torch.where(near_one, log_probability, -math.log(2))
    small = torch.where(near_one, -math.log(2), log_probability)
    complement = torch.where(near_one, (-large.expm1()).log(), (-small.exp()).log1p())
    return log_probability - complement
