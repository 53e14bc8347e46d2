"""Recomputed activations are bitwise the original ones and take no memory until the backward pass."""

from functools import cache

import pytest
import torch
from torch import Tensor

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.optimizers import AdamW
from tests.distributed.cases import COMMON, SHAPES, fsdp2, spec
from tests.distributed.checkpointing_cases import Outcome, two_steps
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Ranks:
    return Ranks(2)


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.results == other.results
    assert same(one.gradients, other.gradients)
    assert same(one.weights, other.weights)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def recomputing(how: str, dp: int = 1, **sizes: int) -> FSDP2:
    return fsdp2(dp, activation_checkpointing=how, **sizes)


@cache
def alone(how: str, layout: str, dropout: float, **first: int) -> Outcome:
    return two_steps(recomputing(how, **first), layout, dropout, torch.float32)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nothing_changes_but_memory(layout: str, dropout: float) -> None:
    kept, selective, full = (alone(how, layout, dropout) for how in ("none", "selective", "full"))
    assert_same(kept, selective)
    assert_same(kept, full)
    assert full.saved_bytes < selective.saved_bytes < kept.saved_bytes
    assert full.saved_bytes < 0.2 * kept.saved_bytes
    partly = alone("full", layout, dropout, recompute_num_layers=1)
    assert_same(kept, partly)
    blocks = SHAPES["qwen3"].get("num_hidden_layers", COMMON["num_hidden_layers"])
    saved = kept.saved_bytes - (kept.saved_bytes - full.saved_bytes) / blocks
    assert partly.saved_bytes == pytest.approx(saved, rel=0.02)


def test_dropout_is_on() -> None:
    """Dropout changes the loss, without which the tests above would not cover it."""
    assert alone("full", "packed", 0.0).results[0].loss != alone("full", "packed", 0.3).results[0].loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_nothing_changes_on_two_ranks(two: Ranks, sizes: dict[str, int], dtype: torch.dtype) -> None:
    outcomes = [
        two.run(two_steps, recomputing(how, **sizes), "packed", 0.3, dtype)
        for how in ("none", "selective", "full")
    ]
    for kept, selective, full in zip(*outcomes, strict=True):
        assert_same(kept, selective)
        assert_same(kept, full)
        assert full.saved_bytes < selective.saved_bytes < kept.saved_bytes


def test_a_model_without_blocks_is_refused() -> None:
    layout = fsdp2()
    model = spec("qwen3").build(spec("qwen3").config())
    layout.check(model, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)
    model._no_split_modules = None
    with pytest.raises(ConfigError, match="names no decoder block"):
        layout.check(model, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)
