"""The table of ``benchmarks.estimates`` has no run twice."""

import pytest

from benchmarks.estimates import FSDP2, ROWS, check_distinct, rehearsed_facts

DP8 = "model=llama3_8b parallelism=fsdp2 parallelism.dp=8"


def test_rows_are_distinct() -> None:
    check_distinct(ROWS)


@pytest.mark.parametrize(
    "words", ["run.micro_batch_size=2", "parallelism.reduce_gradients=every run.global_batch_size=16"]
)
def test_a_row_that_repeats_defaults_is_refused(words: str) -> None:
    """On 8 ranks, 16 rows are one micro-batch of the default 2 rows on each rank."""
    with pytest.raises(AssertionError, match="'second' is the same run as 'first'"):
        check_distinct({"first": DP8, "second": f"{DP8} {words}"})


@pytest.mark.parametrize("when", ["last", "every"])
def test_reductions_are_compared_with_several_microbatches(when: str) -> None:
    facts = rehearsed_facts(f"parallelism=fsdp2 {FSDP2[f'dp8 {when}']}")
    run = facts["run"]
    assert facts["parallelism"]["reduce_gradients"] == when
    assert run["global_batch_size"] == 2 * 8 * run["micro_batch_size"]
