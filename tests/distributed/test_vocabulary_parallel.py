"""A head that is split over 2 or 4 ranks gives the statistics and gradients of full logits."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from components.engines.shared.token_log_probs import CPU_ROWS
from tests.distributed.vocabulary_cases import Answer, Case, Split, V, answer, exact, on_ranks
from tests.ranks import Ranks

SPLITS: dict[str, Split] = {
    "even": [(0, 27), (27, 26)],
    "uneven": [(0, 10), (10, 43)],
    "first is empty": [(0, 0), (0, 53)],
    "last is empty": [(0, 53), (54, 0)],
    "swapped": [(20, 33), (0, 20)],
    "four": [(0, 14), (14, 14), (28, 14), (42, 11)],
    "four uneven": [(0, 1), (1, 40), (41, 0), (41, 12)],
}
PATHS = (False, True)
"""Whether gradients are computed in the forward pass instead of the backward pass."""


@pytest.fixture(scope="module")
def ranks() -> dict[int, Ranks]:
    return {size: Ranks(size) for size in (2, 4)}


def by_rank(
    ranks: dict[int, Ranks],
    split: str,
    cases: Sequence[Case],
    chunk_bytes: int | None = None,
    size: int = V,
) -> list[list[Answer]]:
    """Return for each case the answers of all ranks."""
    shards = SPLITS[split]
    answers = ranks[len(shards)].run(on_ranks, shards, cases, chunk_bytes, size)
    return [list(of_case) for of_case in zip(*answers, strict=True)]


def together(
    ranks: dict[int, Ranks], split: str, cases: Sequence[Case], chunk_bytes: int | None = None
) -> list[Answer]:
    """Return the statistics, which are bitwise equal on all ranks, and the merged gradients of each case."""
    answers = by_rank(ranks, split, cases, chunk_bytes)
    return [merge(of_case, SPLITS[split], case) for of_case, case in zip(answers, cases, strict=True)]


def merge(answers: list[Answer], split: Split, case: Case) -> Answer:
    for other in answers[1:]:
        for a, b in zip(answers[0].stats, other.stats, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    in_order = [answers[rank] for rank in sorted(range(len(split)), key=split.__getitem__)]
    hidden, *of_rows = zip(*(each.gradients for each in in_order), strict=True)
    assert {g.dtype for gradients in (hidden, *of_rows) for g in gradients} == {case.dtype}
    summed = torch.stack([g.double() for g in hidden]).sum(0)
    return replace(answers[0], gradients=[summed, *(torch.cat(parts) for parts in of_rows)])


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative error of the whole tensor."""
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def errors(ours: Answer, theirs: Answer) -> list[float]:
    pairs = zip(ours.stats + ours.gradients, theirs.stats + theirs.gradients, strict=True)
    return [error(a, b) for a, b in pairs]


@pytest.mark.parametrize("split", SPLITS)
def test_statistics_and_gradients_equal_those_of_whole_logits(ranks: dict[int, Ranks], split: str) -> None:
    cases = [Case(w, bias, chunk) for w in PATHS for bias, chunk in ((False, 7), (True, 7), (True, 1000))]
    cases += [Case(weighted, fused=True) for weighted in PATHS]
    for case, ours in zip(cases, together(ranks, split, cases), strict=True):
        assert [t.dtype for t in ours.stats] == [torch.float32] * (2 if case.weighted else 5)
        assert len(ours.gradients) == 2 + case.bias
        for theirs in (exact(case), answer(case)):
            assert max(errors(ours, theirs)) < 1e-6, case


def test_float64_is_exact(ranks: dict[int, Ranks]) -> None:
    cases = [Case(weighted, bias=True, dtype=torch.float64) for weighted in PATHS]
    for case, ours in zip(cases, together(ranks, "uneven", cases), strict=True):
        assert max(errors(ours, exact(case))) < 1e-12, case


def test_bf16_is_as_good_as_whole_logits_in_bf16(ranks: dict[int, Ranks]) -> None:
    cases = [Case(weighted, bias=True, dtype=torch.bfloat16) for weighted in PATHS]
    for case, ours in zip(cases, together(ranks, "four uneven", cases), strict=True):
        true = exact(case)
        for mine, yours in zip(errors(ours, true), errors(exact(case, case.dtype), true), strict=True):
            assert mine <= max(1.5 * yours, 5e-3), case


@pytest.mark.parametrize("split", ["uneven", "last is empty", "four uneven"])
def test_the_default_chunks_agree_between_ranks(ranks: dict[int, Ranks], split: str) -> None:
    cases = [Case(weighted, chunk_size=CPU_ROWS) for weighted in PATHS]
    five_rows = 4 * 5 * math.ceil(V / len(SPLITS[split]))
    for case, ours in zip(cases, together(ranks, split, cases, five_rows), strict=True):
        theirs = exact(case)
        assert ours.collectives[0] == 2 * math.ceil(int((theirs.stats[0] != 0).sum()) / 5) > 2
        assert max(errors(ours, theirs)) < 1e-6, case


def test_two_collectives_a_chunk_and_none_in_the_backward(ranks: dict[int, Ranks]) -> None:
    cases = [Case(weighted, chunk_size=1000) for weighted in PATHS]
    assert [ours.collectives for ours in together(ranks, "uneven", cases)] == [(2, 0)] * 2
    assert [answer(case).collectives for case in cases] == [(0, 0)] * 2


@pytest.mark.parametrize("weighted", PATHS)
def test_no_tensor_has_all_tokens_and_all_rows_of_a_rank(ranks: dict[int, Ranks], weighted: bool) -> None:
    case = Case(weighted, tokens=600, width=4, chunk_size=10)
    labelled = int((exact(case).stats[0] != 0).sum())
    at_once, in_chunks = by_rank(ranks, "even", [replace(case, chunk_size=labelled), case])
    for (_, rows), whole, chunked in zip(SPLITS["even"], at_once, in_chunks, strict=True):
        assert whole.largest == labelled * rows
        assert chunked.largest == case.tokens * case.width < labelled * rows / 3


@pytest.mark.parametrize("split", ["uneven", "first is empty"])
def test_no_label_gives_connected_zeros(ranks: dict[int, Ranks], split: str) -> None:
    cases = [Case(weighted, bias=True, labelled=False) for weighted in PATHS]
    for ours in together(ranks, split, cases):
        assert [len(g) for g in ours.gradients] == [1, V, V]
        assert not any(t.any() for t in ours.stats + ours.gradients)
        assert ours.collectives == (0, 0)


def test_extreme_logits_stay_finite(ranks: dict[int, Ranks]) -> None:
    cases = [Case(weighted, scale=1e4) for weighted in PATHS]
    for case, ours in zip(cases, together(ranks, "four", cases), strict=True):
        assert max(errors(ours, exact(case))) < 1e-5, case


def test_what_is_not_finite_on_one_rank_is_so_on_all(ranks: dict[int, Ranks]) -> None:
    (ours,) = together(ranks, "four", [Case(nan_row=50)])
    labelled = exact(Case()).stats[0] != 0
    *others, _ = ours.stats  # the last is a comparison, which is never NaN
    assert all(torch.equal(t.isnan(), labelled) for t in others)


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_that_no_rank_has_is_refused(ranks: dict[int, Ranks], label: int) -> None:
    with pytest.raises(AssertionError, match="a label is not in the vocabulary"):
        by_rank(ranks, "even", [Case(label=label)])


def test_padded_rows_are_refused(ranks: dict[int, Ranks]) -> None:
    with pytest.raises(AssertionError, match="a padded row of the head"):
        by_rank(ranks, "even", [Case()], size=V - 1)
