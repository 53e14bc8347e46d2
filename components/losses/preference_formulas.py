"""The published losses of a pair of answers: pure functions of two scores.

``chosen``, ``rejected`` and the returned loss are float64 ``[pairs]``. A score is the log-ratio of an answer,
``log pi(y|x) - log pi_ref(y|x)``; or f'(ratio), if another f-divergence than the reverse KL is used; or the
log-probability of the answer, if no reference model is used. The options of a loss are its keyword arguments.
"""

import inspect
import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

PairLoss = Callable[..., Tensor]


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of DPO (Rafailov et al. 2023, equation 7).

    With ``label_smoothing`` eps above 0 it is the loss of conservative DPO (Mitchell 2023), which assumes
    that a share eps of the preferences is reversed.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of SLiC (Zhao et al. 2023), in the form of RSO (Liu et al. 2023, equation 11)."""
    return F.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of IPO (Azar et al. 2023, equation 17); beta is its tau.

    Scores are per token, as in the implementation of its authors.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def robust(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of robust DPO (Chowdhury et al. 2024, equation 11).

    It is an unbiased estimate of the DPO loss if a share ``label_smoothing`` of the preferences is reversed.
    """
    margin, eps = beta * (chosen - rejected), label_smoothing
    return (-(1 - eps) * F.logsigmoid(margin) + eps * F.logsigmoid(-margin)) / (1 - 2 * eps)


def exo_pair(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the loss of EXO (Ji et al. 2024, equation 16): KL(softmax of rewards || (1 - eps, eps)).

    eps is ``label_smoothing``, which must be above 0.
    """
    margin, eps = beta * (chosen - rejected), label_smoothing
    log_chosen, log_rejected = F.logsigmoid(margin), F.logsigmoid(-margin)
    return log_chosen.exp() * (log_chosen - math.log1p(-eps)) + log_rejected.exp() * (
        log_rejected - math.log(eps)
    )


def nca_pair(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of noise contrastive alignment (Chen et al. 2024) for two answers."""
    good, bad = beta * chosen, beta * rejected
    return -F.logsigmoid(good) - 0.5 * F.logsigmoid(-good) - 0.5 * F.logsigmoid(-bad)


def bco_pair(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of binary classifier optimisation (Jung et al. 2024), without its reward shift."""
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def apo_zero(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of APO-zero (D'Oosterlinck et al. 2024, equation 7).

    It is for chosen answers that are better than the model's own.
    """
    return torch.sigmoid(-beta * chosen) + torch.sigmoid(beta * rejected)


def apo_down(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of APO-down (D'Oosterlinck et al. 2024, equation 8).

    It is for chosen answers that are worse than the model's own.
    """
    return torch.sigmoid(beta * chosen) + torch.sigmoid(-beta * (chosen - rejected))


def sppo_hard(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return the loss of SPPO (Wu et al. 2024, equation 4.7); beta is 1 / eta.

    The win probability P is 1 for the chosen and 0 for the rejected answer.
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def discopop(chosen: Tensor, rejected: Tensor, *, beta: float, discopop_tau: float) -> Tensor:
    """Return DiscoPOP (Lu et al. 2024, equation 5), a blend of logistic and exponential loss."""
    margin = beta * (chosen - rejected)
    share = torch.sigmoid(margin / discopop_tau)
    return -F.logsigmoid(margin) * (1 - share) + (F.logsigmoid(margin / discopop_tau) - margin).exp()


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "sppo_hard": sppo_hard,
    "discopop": discopop,
}
"""Losses by their names in TRL; ``sigmoid_norm`` is ``sigmoid`` of scores per token."""

PER_TOKEN = frozenset({"ipo", "sigmoid_norm"})
"""Losses whose scores are divided by the number of labels of the answer."""

OF_THE_DIFFERENCE = frozenset({"sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop"})
"""Losses of the difference of two scores, in which the partition function of any f-divergence cancels."""

SMOOTHED_BY_DESIGN = frozenset({"robust", "exo_pair"})
"""Losses that are defined with ``label_smoothing``, which is an addition to others. If a list has one of
them, the option applies only to these, as in TRL."""


def loss_options(loss: PairLoss) -> frozenset[str]:
    """Return the options that ``loss`` reads in addition to beta."""
    return frozenset(inspect.signature(loss).parameters) - {"chosen", "rejected", "beta"}


# f'(t) of an f-divergence, at t = exp(log_ratio) (Wang et al. 2023, table 1)


def reverse_kl(log_ratio: Tensor) -> Tensor:
    return log_ratio


def forward_kl(log_ratio: Tensor) -> Tensor:
    """Return 1 - 1 / t."""
    return 1 - (-log_ratio).exp()


def js_divergence(log_ratio: Tensor) -> Tensor:
    """Return log(2 t / (t + 1))."""
    return math.log(2) + F.logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """Return (t ** (alpha - 1) - 1) / (alpha - 1), or its limit log t at alpha = 1."""
    power = alpha - 1
    if abs(power) < 1e-6:
        return log_ratio
    # The bound is TRL's: all ratios beyond it give the same value.
    return ((power * log_ratio).clamp(max=80).exp() - 1) / power


F_DIVERGENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
}
"""f' of the divergences without a coefficient, as functions of the log-ratio."""
