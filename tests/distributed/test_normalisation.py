"""The same eight sequences give the same loss and gradients with any micro-batches, ranks and padding."""

import pytest

from tests.distributed.cases import Step, assert_same, engine_step, fsdp2, next_token, plain_step
from tests.ranks import Ranks

CUTS = [(dp, mb) for dp in (1, 2, 4) for mb in (8, 4, 2, 1) if 8 % (dp * mb) == 0]


@pytest.fixture(scope="module")
def ranks() -> dict[int, Ranks]:
    return {size: Ranks(size) for size in (2, 4)}


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Step]:
    return {(f, n): plain_step(f, n) for f in ("qwen3", "llama") for n in ("token", "sequence")}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    ("family", "normalize", "dp", "micro_batch"),
    [*(("qwen3", how, *cut) for how in ("token", "sequence") for cut in CUTS), ("llama", "token", 2, 2)],
)
def test_loss_and_gradients_equal_plain_transformers(
    ranks: dict[int, Ranks],
    references: dict[tuple[str, str], Step],
    family: str,
    normalize: str,
    dp: int,
    micro_batch: int,
    layout: str,
) -> None:
    case = (family, layout, micro_batch, next_token(normalize), fsdp2(dp))
    steps = ranks[dp].run(engine_step, *case) if dp > 1 else [engine_step(*case)]
    for step in steps:
        assert_same(step, references[family, normalize])
