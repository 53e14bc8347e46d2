"""Our core attention and its context-parallel shards, against the softmax formula, mcore and transformers."""

from itertools import product

import pytest

from tests.distributed import context_parallel_cases, core_attention_cases
from tests.distributed.core_attention_cases import WINDOW, Case
from tests.ranks import Ranks

KINDS = {1: ("all_gather",), 2: ("all_gather", "a2a"), 4: ("all_gather", "a2a")}
"""Context-parallel size -> the ways to exchange keys and values, or heads."""
LAYOUTS = ("packed", "padded")


def check(megatron_ranks: Ranks, cases: list[Case]) -> None:
    for answers in megatron_ranks.run(core_attention_cases.errors, cases):
        for case, (output, gradient, padding_is_ignored) in zip(cases, answers, strict=True):
            assert output < 1e-12, case
            assert gradient < 1e-11, case
            assert padding_is_ignored, case


@pytest.mark.parametrize("cp", KINDS)
def test_output_and_gradients_equal_the_softmax_formula(megatron_ranks: Ranks, cp: int) -> None:
    varied = product(KINDS[cp], LAYOUTS, (None, 1, WINDOW))
    check(megatron_ranks, [Case(cp, kind, layout, window=window) for kind, layout, window in varied])


@pytest.mark.parametrize("cp", [2, 4])
def test_key_value_heads_need_not_divide_by_cp(megatron_ranks: Ranks, cp: int) -> None:
    check(megatron_ranks, [Case(cp, "a2a", "packed", heads=heads) for heads in ((4, 4), (12, 3), (4, 1))])


@pytest.mark.parametrize("cp", KINDS)
def test_a_row_with_padding_at_its_end(megatron_ranks: Ranks, cp: int) -> None:
    varied = product(KINDS[cp], LAYOUTS, ((24,), (3, 3), (16, 8)))
    cases = [Case(cp, kind, layout, lengths=lengths, longer=3) for kind, layout, lengths in varied]
    check(megatron_ranks, cases)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_generator_of_mcore(
    megatron_ranks: Ranks, cp: int, sequence_parallel: bool
) -> None:
    cases = [Case(cp, kind, layout) for kind, layout in product(KINDS[cp], LAYOUTS)]
    expected = {
        "eval is exact": True,
        "train drops": True,
        "draws are new": True,
        "ordinary generator moved": sequence_parallel,
    }
    found = megatron_ranks.run(core_attention_cases.dropped, cases, sequence_parallel)
    assert found == [[expected] * len(cases)] * 4


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rotary_positions_are_those_of_the_batch(megatron_ranks: Ranks, cp: int) -> None:
    rows = (((7, 1, 20, 12), 0), ((7, 20), 6), ((16,), 0), ((16,), 1))
    cases = [
        Case(cp, "a2a", layout, lengths=lengths, longer=longer)
        for lengths, longer in rows
        for layout in LAYOUTS
    ]
    for answers in megatron_ranks.run(context_parallel_cases.rotary_errors, cases):
        for case, error in zip(cases, answers, strict=True):
            assert error < 1e-5, case


@pytest.mark.parametrize("cp", [2, 4])
def test_a_padded_row_is_cut_as_mcore_cuts_it(megatron_ranks: Ranks, cp: int) -> None:
    assert all(megatron_ranks.run(context_parallel_cases.zig_zag, cp))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_loss_over_gathered_values_has_the_gradient_of_one_rank(megatron_ranks: Ranks, cp: int) -> None:
    for answers in megatron_ranks.run(context_parallel_cases.gather_errors, cp):
        for value, gradient in answers:
            assert value == 0
            assert gradient < 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("cp", "kind"), [(1, "all_gather"), (2, "all_gather"), (2, "a2a")])
def test_a_model_equals_that_with_the_attention_of_mcore(
    megatron_ranks: Ranks, cp: int, kind: str, layout: str
) -> None:
    """Few cases are one call, because Megatron makes all its groups for every model."""
    cases = [Case(cp, kind, layout, window=window, longer=1) for window in (None, WINDOW)]
    for answers in megatron_ranks.run(context_parallel_cases.model_errors, cases):
        for logits, gradients in answers:
            assert logits < 1e-4
            assert gradients < 1e-5
