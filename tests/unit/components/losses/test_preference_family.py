"""Losses over pairs: packed equals padded, empty micro-batches add nothing, unread options are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from components.contracts.batch import IGNORE
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.losses import CPO, DPO, ORPO
from components.losses.cpo_orpo import log_odds
from components.losses.preference_base import PairwiseLoss
from components.losses.preference_formulas import PAIR_LOSSES, loss_options
from tests.unit.components.losses.test_preference import LENGTHS, SHUFFLED, empty, make, rows

SMOOTHED = {"exo_pair": 1e-3, "robust": 0.1}
LOSSES: dict[str, PairwiseLoss] = {
    **{kind: DPO(beta=0.3, label_smoothing=SMOOTHED.get(kind, 0.0), loss=kind) for kind in PAIR_LOSSES},  # type: ignore[arg-type]
    "rpo": DPO(beta=0.3, rpo_alpha=0.7),
    "ld": DPO(beta=0.3, ld_alpha=0.4),
    "mpo": DPO(loss=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 0.5)),
    "wpo": DPO(beta=0.3, wpo=True),
    "js": DPO(beta=0.3, f_divergence="js_divergence"),
    "no reference": DPO(beta=0.3, reference="none"),
    "cpo": CPO(beta=0.3, loss="sigmoid", cpo_alpha=1.0),
    "simpo": CPO(beta=2.0, loss="simpo", cpo_alpha=0.0, simpo_gamma=0.8),
    "orpo": ORPO(beta=0.3),
}


def squares(loss: PairwiseLoss, logps: Tensor) -> Tensor | None:
    """Return values for the statistic that WPO needs, or None for other losses."""
    return logps.detach() / 3 if "log_sum_sq_probs" in loss.requires else None


EVERY = pytest.mark.parametrize("name", LOSSES)


def run(loss: PairwiseLoss, layout: str) -> tuple[dict[str, float], dict[str, int], list[torch.Tensor]]:
    """Return the terms, the counts, and the gradient of every sequence."""
    batch, logps = make(layout, SHUFFLED)
    output = loss(TokenStats(logps, log_sum_sq_probs=squares(loss, logps)), batch)
    torch.stack(list(output.terms.values())).sum().backward()
    assert logps.grad is not None
    grads = logps.grad[0].split(LENGTHS) if layout == "packed" else logps.grad
    cut = [grad[:length] for grad, length in zip(grads, LENGTHS, strict=True)]
    return {name: term.item() for name, term in output.terms.items()}, loss.counts(batch), cut


@EVERY
def test_packed_is_padded(name: str) -> None:
    packed, padded = (run(LOSSES[name], layout) for layout in ("packed", "padded"))
    assert packed[0] == pytest.approx(padded[0], rel=1e-6)
    assert packed[1] == padded[1]
    assert list(packed[0]) == list(packed[1]), "counts are in the order of the terms"
    for a, b in zip(packed[2], padded[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert any(grad.any() for grad in packed[2])


@EVERY
def test_an_empty_microbatch_adds_nothing(name: str) -> None:
    logps = torch.zeros(1, 1, requires_grad=True)
    found = TokenStats(logps * 1, log_sum_sq_probs=squares(LOSSES[name], logps))
    output = LOSSES[name](found, empty())
    torch.stack(list(output.terms.values())).sum().backward()
    assert [term.item() for term in output.terms.values()] == [0] * len(output.terms)
    assert set(LOSSES[name].counts(empty()).values()) == {0}
    assert logps.grad is not None
    assert not logps.grad.any()


@pytest.mark.parametrize("margin", [-8000.0, 8000.0])
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_a_long_answer_that_the_model_has_left_far_behind_has_a_finite_loss(kind: str, margin: float) -> None:
    options = {"discopop_tau": 0.05, "label_smoothing": SMOOTHED.get(kind, 0.0)}
    read = {name: value for name, value in options.items() if name in loss_options(PAIR_LOSSES[kind])}
    chosen = torch.tensor(margin, requires_grad=True)
    PAIR_LOSSES[kind](chosen, torch.zeros(()), beta=1.0, **read).backward()
    assert chosen.grad is not None
    assert chosen.grad.isfinite()


@pytest.mark.parametrize("name", ["rpo", "mpo", "cpo", "orpo"])
def test_the_likelihood_is_of_chosen_tokens(name: str) -> None:
    loss, (batch, logps) = LOSSES[name], make("packed", SHUFFLED)
    chosen = [row for row, index in zip(rows(), SHUFFLED, strict=True) if index % 2 == 0]
    nll = -sum(float(row[1].double().sum()) for row in chosen)
    assert loss(TokenStats(logps), batch).terms["nll"].item() == pytest.approx(loss.nll_weight * nll)
    assert loss.counts(batch) == {"loss": 3, "nll": sum(int((row[0] != IGNORE).sum()) for row in chosen)}


def test_a_longer_answer_counts_up_to_the_length_of_the_other() -> None:
    """Given 3 and 6 labels, the last three of the longer answer have the weight ``ld_alpha``."""
    batch, logps = make("packed", [0, 1, -1, -1, -1, -1])
    assert batch.ref_logps is not None
    output = DPO(beta=1.0, ld_alpha=0.4)(TokenStats(logps), batch)
    ratio = (logps - batch.ref_logps).detach()[0].double()
    weights = torch.tensor([1.0] * 3 + [0.4] * 3, dtype=torch.float64)
    expected = ratio[2:5].sum(), (weights * ratio[7:13]).sum()
    found = [output.metrics[f"rewards/{side}"][0].item() for side in ("chosen", "rejected")]
    assert found == pytest.approx([float(value) for value in expected])


def test_labels_are_counted_in_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with ``run.deterministic``, torch refuses the cumulative sum of floating-point numbers."""
    cumsum = Tensor.cumsum

    def refuse(values: Tensor, *args: Any, **options: Any) -> Tensor:
        assert not values.is_floating_point()
        return cumsum(values, *args, **options)

    monkeypatch.setattr(Tensor, "cumsum", refuse)
    for name in LOSSES:
        batch, logps = make("packed", SHUFFLED)
        LOSSES[name](TokenStats(logps, logps), batch)


def test_batches_that_carry_a_reference_keep_it() -> None:
    batches = [make("packed", SHUFFLED)[0], empty()]
    assert DPO(beta=0.1, reference="precomputed").prepare(batches, None) is batches  # type: ignore[arg-type]


def test_without_a_reference_nobody_is_asked() -> None:
    batch, logps = make("packed", SHUFFLED)
    bare = replace(batch, ref_logps=None)
    loss = DPO(beta=0.3, reference="none")
    assert loss.prepare([bare], None) == [bare]  # type: ignore[arg-type]
    zeros = DPO(beta=0.3)(TokenStats(logps), replace(batch, ref_logps=torch.zeros_like(logps)))
    assert loss(TokenStats(logps), bare).terms["loss"] == zeros.terms["loss"]


def test_odds_are_exact_near_certainty_and_far_from_it() -> None:
    exact = {1e-15: 34.538776394910684, 0.5: 0.0, 1 - 1e-12: -27.631021115927547}
    for complement, expected in exact.items():
        value = torch.tensor(-complement, dtype=torch.float64).log1p().requires_grad_()
        found = log_odds(value)
        found.backward()
        assert found.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert value.grad is not None
        assert value.grad.item() == pytest.approx(1 / complement, rel=1e-3)
    certain = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    (-torch.nn.functional.logsigmoid(log_odds(certain) + 1)).backward()
    assert certain.grad == 0
    far = torch.tensor(-900.0, dtype=torch.float64, requires_grad=True)
    log_odds(far).backward()
    assert far.grad == 1


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "smoothed hinge": ({"loss": "hinge", "label_smoothing": 0.1}, ["stage.label_smoothing", "loss=hinge"]),
    "bare exo": ({"loss": "exo_pair"}, ["stage.label_smoothing", "exo_pair", "above 0"]),
    "tau of sigmoid": ({"discopop_tau": 0.1}, ["stage.discopop_tau", "stage.loss=discopop"]),
    "tau": ({"loss": "discopop", "discopop_tau": 0.0}, ["stage.discopop_tau", "above 0"]),
    "divergence of no difference": (
        {"loss": "apo_zero", "f_divergence": "js_divergence"},
        ["stage.f_divergence", "stage.loss=apo_zero", "robust"],
    ),
    "divergence from nothing": (
        {"reference": "none", "f_divergence": "js_divergence"},
        ["stage.f_divergence", "stage.reference=none"],
    ),
    "coefficient": ({"alpha_divergence_coef": 0.5}, ["stage.alpha_divergence_coef", "reverse_kl"]),
    "ld_alpha": ({"ld_alpha": 1.5}, ["stage.ld_alpha", "from 0 to 1"]),
    "rpo_alpha": ({"rpo_alpha": -1.0}, ["stage.rpo_alpha", "at least 0"]),
    "sync": ({"sync_reference_every": -1}, ["stage.sync_reference_every", "at least 0"]),
    "mixup alone": (
        {"sync_reference_mixup": 0.5},
        ["stage.sync_reference_mixup", "stage.sync_reference_every only"],
    ),
    "mixup": (
        {"sync_reference_every": 2, "sync_reference_mixup": 1.5},
        ["stage.sync_reference_mixup", "at most 1"],
    ),
    "no pairs": ({"loss": ("sft",)}, ["stage.loss", "stage=sft"]),
    "one weight": ({"loss": "ipo", "loss_weights": (1.0,)}, ["stage.loss_weights", "list"]),
    "three weights": (
        {"loss": ("ipo", "sigmoid"), "loss_weights": (1.0, 1.0, 1.0)},
        ["stage.loss_weights", "3", "2"],
    ),
    "weight of 0": (
        {"loss": ("ipo", "sigmoid"), "loss_weights": (0.0, 1.0)},
        ["stage.loss_weights", "above 0", "[0.0, 1.0]"],
    ),
    "smoothed list": (
        {"loss": ("ipo", "hinge"), "label_smoothing": 0.1},
        ["stage.label_smoothing", "loss=ipo,hinge"],
    ),
    "divergence of a list": (
        {"loss": ("ipo", "apo_zero"), "f_divergence": "js_divergence"},
        ["stage.f_divergence", "stage.loss=apo_zero"],
    ),
    "two likelihoods": ({"loss": ("ipo", "sft"), "rpo_alpha": 1.0}, ["stage.rpo_alpha", "sft"]),
    "weighted likelihood": ({"wpo": True, "rpo_alpha": 1.0}, ["stage.wpo", "stage.rpo_alpha"]),
    "weighted sft": ({"wpo": True, "loss": ("ipo", "sft")}, ["stage.wpo", "sft"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_a_loss_does_not_read_are_refused(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        DPO(**{"beta": 0.1, "label_smoothing": 0.0} | options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"loss": "hinge", "label_smoothing": 0.1}, "stage.label_smoothing"),
        ({"loss": "sigmoid", "simpo_gamma": 0.1}, "stage.simpo_gamma"),
        ({"loss": "simpo", "simpo_gamma": -0.1}, "stage.simpo_gamma"),
        ({"loss": "sigmoid", "cpo_alpha": -0.1}, "stage.cpo_alpha"),
        ({"loss": "sigmoid", "label_smoothing": 0.5}, "stage.label_smoothing"),
        ({"loss": "sigmoid", "beta": 0.0}, "stage.beta"),
    ],
    ids=str,
)
def test_and_those_of_cpo(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        CPO(**{"beta": 0.1, "cpo_alpha": 1.0} | options)
