"""Every preference loss has the same gradient in micro-batches of any size and in every layout."""

import pytest

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from tests.distributed.cases import assert_same, fsdp2, megatron
from tests.distributed.preference_cases import FEW, LOSSES, Found, every_loss
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def single() -> Found:
    return every_loss(fsdp2(), "packed", 8, tuple(LOSSES))


@pytest.fixture(scope="module")
def ranks() -> dict[int, Ranks]:
    return {size: Ranks(size, megatron=True) for size in (2, 4)}


def compare(found: Found, single: Found) -> None:
    for name, (step, metrics, evaluated) in found.items():
        expected, means, _ = single[name]
        assert_same(step, expected)
        assert metrics == pytest.approx(means, rel=1e-4, abs=1e-5), name
        assert evaluated == pytest.approx({"loss": step.loss, **metrics}, rel=1e-5, abs=1e-6), name


def test_no_two_losses_are_one(single: Found) -> None:
    """All losses have different gradients, and KTO's KL term is above 0, so that it has an effect."""
    assert len({round(step.grad_norm, 5) for step, _, _ in single.values()}) == len(LOSSES)
    assert single["kto"][1]["kl"] > 0.1
    assert single["rpo, ld"][1]["nll"] > 0.1


@pytest.mark.parametrize(("micro_batch", "layout"), [(2, "packed"), (4, "packed"), (2, "padded")])
def test_micro_batches_add_up(single: Found, micro_batch: int, layout: str) -> None:
    names = tuple(LOSSES) if (micro_batch, layout) == (4, "packed") else FEW
    compare(every_loss(fsdp2(), layout, micro_batch, names), single)


@pytest.mark.parametrize(
    ("on", "packed"),
    [(fsdp2(2), tuple(LOSSES)), (megatron(tp=2, pp=2, dp=1), FEW)],
    ids=["dp2", "tp2pp2"],
)
def test_layouts(
    ranks: dict[int, Ranks], single: Found, on: FSDP2 | Megatron, packed: tuple[str, ...]
) -> None:
    pool = ranks[on.world_size({}, 0)]
    for layout, names in (("packed", packed), ("padded", FEW)):
        for found in pool.run(every_loss, on, layout, 2, names):
            compare(found, single)


def test_rows_that_are_cut(ranks: dict[int, Ranks], single: Found) -> None:
    for found in ranks[4].run(every_loss, megatron(cp=2, dp=2), "packed", 2, FEW):
        compare(found, single)
