"""Chunked statistics equal the same statistics from full logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from components.contracts.batch import IGNORE
from components.contracts.loss import TokenStats
from components.engines.shared import fused_softmax, token_log_probs
from components.engines.shared.token_log_probs import token_stats
from tests.chunked_stats import chunked_stats

H, V = 16, 53
ALL = frozenset({"logsumexp", "mean_logp", "log_sum_sq_probs", "correct"})
CHUNKS = [1, 7, 1000]
KINDS = ["plain", "bias", "fused"]


def make(
    *, dtype: torch.dtype = torch.float32, bias: bool = False, labelled: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return hidden [3, 11, H], head weight, labels [3, 11] with about a third ignored, and bias."""
    g = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(3, 11, H, generator=g)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=g).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (3, 11), generator=g)
    labels[0] = (hidden[0] @ weight.T).argmax(-1)  # chance would make almost none the largest of 53
    labels[torch.rand(3, 11, generator=g) < (0.35 if labelled else 2.0)] = IGNORE
    vector = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    return hidden, weight, labels, vector


def full(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> TokenStats:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    keep = labels != IGNORE
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    squares = (2 * logp).logsumexp(-1).detach()
    correct = (logits.argmax(-1) == labels).to(picked.dtype)
    return TokenStats(
        picked * keep, logits.logsumexp(-1) * keep, logp.mean(-1) * keep, squares * keep, correct
    )


def mixed(stats: TokenStats) -> Tensor:
    """Return a sum in which every statistic has its own random weight at every position."""
    g = torch.Generator().manual_seed(1)
    parts = [stats.logps, stats.logsumexp, stats.mean_logp]
    return sum((torch.randn(p.shape, generator=g) * p).sum() for p in parts if p is not None)


def gradients(loss: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [tensor for tensor in inputs if tensor is not None]))


def assert_close(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= relative * b.double().norm()


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_gradients_equal_those_of_full_logits(chunk_size: int, kind: str) -> None:
    hidden, weight, labels, vector = make(bias=kind == "bias")
    options: dict[str, Any] = {"requires": ALL, "chunk_size": chunk_size, "fused": kind == "fused"}
    ours = chunked_stats(hidden, weight, labels, head_bias=vector, **options)
    theirs = full(hidden, weight, labels, vector)
    for name in ("logps", *ALL):
        assert getattr(ours, name).dtype == torch.float32
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)
    inputs = (hidden, weight, vector)
    assert_close(gradients(mixed(ours), *inputs), gradients(mixed(theirs), *inputs), 1e-5)


@pytest.mark.parametrize("requires", [frozenset(), *(frozenset({name}) for name in sorted(ALL))])
@pytest.mark.parametrize("fused", [False, True])
def test_only_what_is_required_is_returned(requires: frozenset[str], fused: bool) -> None:
    hidden, weight, labels, _ = make()
    ours = chunked_stats(hidden, weight, labels, requires=requires, chunk_size=5, fused=fused)
    theirs = full(hidden, weight, labels, None)
    theirs = replace(theirs, **dict.fromkeys(ALL - requires))
    assert {n for n in ALL if getattr(ours, n) is not None} == requires
    assert_close(gradients(mixed(ours), hidden, weight), gradients(mixed(theirs), hidden, weight), 1e-5)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 0.0])
def test_gradients_made_in_the_forward_equal_those_of_full_logits(
    chunk_size: int, kind: str, scale: float
) -> None:
    hidden, weight, labels, vector = make(bias=kind == "bias")
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) * (labels != IGNORE)
    options: dict[str, Any] = {"weights": weights, "chunk_size": chunk_size, "fused": kind == "fused"}
    ours = chunked_stats(hidden, weight, labels, head_bias=vector, requires=frozenset({"correct"}), **options)
    theirs = full(hidden, weight, labels, vector)
    torch.testing.assert_close(ours.logps, theirs.logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.correct, theirs.correct)
    inputs = (hidden, weight, vector)
    grads = [gradients(-scale * (weights * s.logps).sum(), *inputs) for s in (ours, theirs)]
    assert_close(*grads, 1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_good_as_full_logits_in_bf16(weighted: bool, kind: str) -> None:
    hidden, weight, labels, vector = make(dtype=torch.bfloat16, bias=kind == "bias")
    weights = (labels != IGNORE).float()
    options: dict[str, Any] = {"weights": weights if weighted else None, "chunk_size": 7}
    ours = chunked_stats(hidden, weight, labels, head_bias=vector, fused=kind == "fused", **options)
    assert ours.logps.dtype == torch.float32
    inputs = [hidden, weight, vector]
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs if t is not None]
    exact = full(exact_inputs[0], exact_inputs[1], labels, *(exact_inputs[2:] or [None]))
    theirs = full(hidden, weight, labels, vector)
    grads = [gradients(-(weights * s.logps).sum(), *inputs) for s in (ours, theirs)]
    exact_grads = gradients(-(weights * exact.logps).sum(), *exact_inputs)
    for mine, yours, true in zip(*grads, exact_grads, strict=True):
        assert mine.dtype == torch.bfloat16
        error, their_error = ((g.double() - true).norm() / true.norm() for g in (mine, yours))
        assert error <= max(1.5 * their_error, 5e-3)


def test_gradcheck() -> None:
    hidden, weight, labels, vector = make(dtype=torch.float64, bias=True)

    def stats(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
        s = chunked_stats(h, w, labels, head_bias=b, requires=ALL, chunk_size=4)
        return s.logps, s.logsumexp, s.mean_logp

    assert torch.autograd.gradcheck(stats, (hidden, weight, vector), fast_mode=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_tied_weights_receive_both_gradients(weighted: bool) -> None:
    _, table, labels, _ = make()
    ids = torch.randint(0, V, labels.shape, generator=torch.Generator().manual_seed(3))
    weights = (labels != IGNORE).float() if weighted else None
    ours = chunked_stats(table[ids].tanh(), table, labels, weights=weights, chunk_size=7)
    theirs = full(table[ids].tanh(), table, labels, None)
    assert_close(gradients(-ours.logps.sum(), table), gradients(-theirs.logps.sum(), table), 1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_no_label_gives_connected_zeros(weighted: bool) -> None:
    hidden, weight, labels, vector = make(bias=True, labelled=False)
    weights = torch.zeros(labels.shape) if weighted else None
    requires = frozenset() if weighted else ALL
    stats = token_stats(hidden, weight, labels, head_bias=vector, requires=requires, weights=weights)
    assert not stats.logps.any()
    for grad in gradients(mixed(stats), hidden, weight, vector):
        assert not grad.any()


@pytest.mark.parametrize("fused", [False, True])
def test_extreme_logits_stay_finite(fused: bool) -> None:
    hidden, weight, labels, _ = make(scale=1e4)
    stats = chunked_stats(hidden, weight, labels, requires=ALL, chunk_size=7, fused=fused)
    found = [values for values in vars(stats).values() if values is not None]  # not those of a scalar head
    assert len(found) == 1 + len(ALL)
    assert all(torch.isfinite(values).all() for values in found)
    assert all(torch.isfinite(g).all() for g in gradients(mixed(stats), hidden, weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_frozen_input(frozen: str, weighted: bool) -> None:
    hidden, weight, labels, _ = make()
    still, moving = (hidden, weight) if frozen == "hidden" else (weight, hidden)
    still.requires_grad_(False)
    weights = (labels != IGNORE).float() if weighted else None
    ours, theirs = token_stats(hidden, weight, labels, weights=weights), full(hidden, weight, labels, None)
    assert_close(gradients(-ours.logps.sum(), moving), gradients(-theirs.logps.sum(), moving), 1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(token_log_probs, "Gradients", refuse)
    hidden, weight, labels, _ = make()
    weights = (labels != IGNORE).float()
    with pytest.raises(AssertionError, match="a gradient"):
        token_stats(hidden, weight, labels, weights=weights)
    hidden.requires_grad_(not frozen)
    weight.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        stats = token_stats(hidden, weight, labels, weights=weights)
    torch.testing.assert_close(stats.logps, full(hidden, weight, labels, None).logps.detach())


def test_a_loss_that_is_not_what_its_weights_say_is_caught() -> None:
    hidden, weight, labels, _ = make()
    weights = (labels != IGNORE).float()
    stats = token_stats(hidden, weight, labels, weights=weights)
    with pytest.raises(AssertionError, match="the loss is not"):
        stats.logps.square().sum().backward()


def test_weights_and_other_statistics_exclude_each_other() -> None:
    hidden, weight, labels, _ = make()
    with pytest.raises(AssertionError):
        token_stats(hidden, weight, labels, requires=ALL, weights=(labels != IGNORE).float())


def test_the_compiled_kernels_equal_their_functions() -> None:
    """The kernels are made for the CPU here, in C++; ``tests/gpu`` trains with those of a GPU."""
    logits, targets = torch.randn(5, V).bfloat16(), torch.tensor([0, V, 7, -1, V - 1])
    sums = fused_softmax.row_sums(logits)
    for ours, theirs in zip(sums, fused_softmax._row_sums(logits), strict=True):
        torch.testing.assert_close(ours, theirs)
    of_row = [torch.randn(5) for _ in range(4)]
    ours, theirs = logits.clone(), logits.clone()
    fused_softmax.write_gradient(ours, *of_row[:2], targets, *of_row[2:])
    fused_softmax._write_gradient(theirs, *of_row[:2], targets, *of_row[2:])
    torch.testing.assert_close(ours, theirs)
