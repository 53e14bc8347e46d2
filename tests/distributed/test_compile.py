"""``run.compile=true``: compiled blocks compute what plain transformers computes."""

import pytest

from components.engines.fsdp2 import FSDP2
from tests.distributed.cases import assert_same, fsdp2, plain_step
from tests.distributed.compile_cases import Compiled, one_step
from tests.ranks import Ranks

LAYOUTS = {"recomputed": fsdp2(activation_checkpointing="full"), "tp2": fsdp2(1, tp=2)}


def run(on: FSDP2, *args: str) -> Compiled:
    size = on.world_size({}, 0)
    if size == 1:
        return one_step(on, *args)
    with Ranks(size) as ranks:
        return ranks.run(one_step, on, *args, timeout=300)[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks_equal_plain_transformers(name: str) -> None:
    """Five blocks of eight lengths: they share graphs, which end at attention and at sums over ranks."""
    compiled = run(LAYOUTS[name], "deep", "packed")
    assert_same(compiled.step, plain_step("deep", "token"))
    assert 0 < compiled.graphs <= 12
