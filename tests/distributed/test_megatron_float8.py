"""``run.dtype=fp8`` on Megatron, up to the products themselves, which are transformer-engine's on a GPU."""

from typing import Any

import pytest

from tests.distributed.cases import assert_same, megatron, plain_step
from tests.distributed.megatron_float8_cases import recorded_step
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("sizes", "layout", "multiple"),
    [
        ({}, "padded", 16),
        ({"fp8_recipe": "mxfp8", "pp": 2}, "packed", 32),
        ({"tp": 2, "sequence_parallel": True}, "packed", 16),
    ],
    ids=["one process", "pp2", "tp2 sp"],
)
def test_layers_get_rows_of_fitting_lengths(sizes: dict[str, Any], layout: str, multiple: int) -> None:
    """The tokens that are added change neither the loss nor a gradient."""
    on, expected = megatron(dp=1, **sizes), plain_step("qwen3", "token")
    ranks = on.pp * on.tp
    found = Ranks(ranks, megatron=True).run(recorded_step, on, layout, 2)
    for rank, (step, layers, lengths) in enumerate(found):
        assert_same(step, expected)
        first, number = (rank, 1) if on.pp == 2 else (0, 2)
        assert layers == list(range(first, first + number)) * 4
        assert not any(length % multiple for length in lengths)
