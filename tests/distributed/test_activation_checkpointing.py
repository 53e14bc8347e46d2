"""Recomputed activations are bitwise the original ones and take no memory until the backward pass."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import FSDP2
from components.models.moe_loss_config import MoELossConfig
from components.optimizers import AdamW
from tests.distributed.cases import COMMON, LENGTHS, SHAPES, fsdp2, spec
from tests.distributed.checkpointing_cases import Outcome, two_steps
from tests.distributed.expert_cases import Work, run
from tests.ranks import Ranks

MLP, BOTH = ("mlp",), ("core_attn", "mlp")


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.results == other.results
    assert same(one.gradients, other.gradients)
    assert same(one.weights, other.weights)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def recomputing(how: str, dp: int = 1, **keys: Any) -> FSDP2:
    return fsdp2(dp, activation_checkpointing=how, **keys)


@cache
def alone(how: str, layout: str, dropout: float, **keys: Any) -> Outcome:
    return two_steps(recomputing(how, **keys), layout, dropout, torch.float32)


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


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_only_the_named_modules_are_recomputed(layout: str) -> None:
    """A dense MLP saves four tensors of its width, and each module saves memory of its own."""
    kept, attention = (alone(how, layout, 0.3) for how in ("none", "selective"))
    named = [alone("selective", layout, 0.3, recompute_modules=names) for names in (MLP, BOTH)]
    for outcome in named:
        assert_same(kept, outcome)
    blocks = SHAPES["qwen3"].get("num_hidden_layers", COMMON["num_hidden_layers"])
    tokens = sum(LENGTHS[:4]) if layout == "packed" else 4 * max(LENGTHS[:4])
    of_mlps = blocks * tokens * 4 * COMMON["intermediate_size"] * 4
    assert [kept.saved_bytes - each.saved_bytes for each in named] == [
        of_mlps,
        of_mlps + kept.saved_bytes - attention.saved_bytes,
    ]


@pytest.mark.parametrize(("family", "modules"), [("deepseek", ("mlp", "moe")), ("mixtral", ("moe",))])
def test_recomputed_experts_change_nothing(family: str, modules: tuple[str, ...]) -> None:
    """The router losses and loads are those of the first pass."""
    work = Work(family, steps=2, terms=MoELossConfig("sequence", 0.1, z_loss_coef=0.01))
    kept, again = (
        run(recomputing(how, recompute_modules=names), work)
        for how, names in (("none", None), ("selective", modules))
    )
    assert kept.results == again.results
    assert same(kept.first.grads, again.first.grads)


def test_dropout_is_on() -> None:
    """Dropout changes the loss, without which the tests above would not cover it."""
    assert alone("full", "packed", 0.0).results[0].loss != alone("full", "packed", 0.3).results[0].loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_nothing_changes_on_two_ranks(two: Ranks, sizes: dict[str, int], dtype: torch.dtype) -> None:
    outcomes = [
        two.run(two_steps, recomputing(how, **sizes, recompute_modules=names), "packed", 0.3, dtype)
        for how, names in (("none", None), ("selective", None), ("selective", BOTH), ("full", None))
    ]
    for kept, selective, both, full in zip(*outcomes, strict=True):
        assert_same(kept, selective)
        assert_same(kept, both)
        assert_same(kept, full)
        assert full.saved_bytes < both.saved_bytes < selective.saved_bytes < kept.saved_bytes


def test_a_model_without_blocks_is_refused() -> None:
    layout = fsdp2()
    model = spec("qwen3").build(spec("qwen3").config())
    layout.check(model, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)
    model._no_split_modules = None
    with pytest.raises(ConfigError, match="names no decoder block"):
        layout.check(model, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)
