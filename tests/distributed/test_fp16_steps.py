"""fp16 with a dynamic loss scale skips the steps and changes the scale as ``torch.amp.GradScaler`` does."""

from functools import cache
from typing import Any

import pytest
import torch

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.moe_loss_config import MoELossConfig
from tests.distributed.cases import fsdp2, megatron
from tests.distributed.fp16_cases import Scaled, curve, curves, gradients_of, torch_curve
from tests.ranks import Ranks

SHARDED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
SP = {"tp": 2, "sequence_parallel": True}
DENSE, EXPERTS = "llama_four", "qwen3_moe"
LAYOUTS: dict[tuple[int, str, str], list[FSDP2 | Megatron]] = {
    (2, "fsdp2", DENSE): [fsdp2(2), fsdp2(tp=2), fsdp2(cp=2)],
    (2, "megatron", DENSE): [
        megatron(dp=2, **SHARDED),
        megatron(dp=1, **SP),
        megatron(pp=2, dp=1),
        megatron(pp=2, vpp=2, dp=1),
        megatron(cp=2, dp=1),
    ],
    (4, "fsdp2", DENSE): [fsdp2(4, dp_replicate=2), fsdp2(tp=2, cp=2)],
    (4, "megatron", DENSE): [megatron(pp=2, dp=1, **SP), megatron(pp=2, dp=2, **SHARDED)],
    (4, "fsdp2", EXPERTS): [fsdp2(4, ep=2), fsdp2(2, tp=2, ep=2)],
    (4, "megatron", EXPERTS): [
        megatron(pp=2, dp=2, ep=2, **SHARDED),
        megatron(dp=2, ep=2, **SP),
        megatron(cp=2, dp=2, ep=2),
    ],
}
"""Layouts by number of ranks, engine and model."""


@cache
def expected(family: str) -> list[Scaled]:
    return torch_curve(family)


def assert_same(found: list[Scaled], family: str) -> None:
    """Compare scales and skips exactly, and numbers up to some roundings of fp16, by 2**-11 each.

    The first norm that is finite is that of equal weights. Later ones follow updates by AdamW, which divides
    each gradient by its size, so that a rounded small gradient changes a weight by as much as a large one. A
    rounded router may send a token to another expert.
    """
    steps, bound = expected(family), 2**-9 if family == EXPERTS else 2**-11
    assert [(s.scale, s.skipped) for s in found] == [(s.scale, s.skipped) for s in steps]
    taken = 0
    for ours, theirs in zip(found, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=bound)
        if not theirs.skipped:
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2**-7 if taken else 2**-9)
            taken += 1


@pytest.mark.parametrize("family", [DENSE, EXPERTS])
def test_scale_and_skips_are_those_of_torch(family: str) -> None:
    skipped = [step.skipped for step in expected(family)]
    assert skipped[:2] == [True] * 2
    assert 0 < sum(skipped[3:]) < len(skipped[3:])
    for on in (fsdp2(), megatron(dp=1)):
        assert_same(curve(on, family), family)


@pytest.mark.parametrize(("size", "engine", "family"), LAYOUTS)
def test_every_layout_has_the_same_scale_and_skips(size: int, engine: str, family: str) -> None:
    ranks = Ranks(size, megatron=engine == "megatron")
    for of_rank in ranks.run(curves, LAYOUTS[size, engine, family], family, seconds=120):
        for found in of_rank:
            assert_same(found, family)


ROUTERS = MoELossConfig(aux_loss="switch", aux_loss_coef=1.0, z_loss_coef=0.1)
FURTHER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "router losses": ({"family": "qwen3_moe", "moe": ROUTERS}, {"family": "qwen3_moe"}),
    "multi-token prediction": ({"mtp_layers": 1}, {}),
}
"""Options of models with further terms of the loss, and of the same models without them."""


@pytest.mark.parametrize("name", FURTHER)
@pytest.mark.parametrize("on", [fsdp2(), megatron(dp=1)], ids=["fsdp2", "megatron"])
def test_further_terms_are_scaled_like_the_loss(on: FSDP2 | Megatron, name: str) -> None:
    options, without = FURTHER[name]
    exact, halves = (gradients_of(on, dtype, **options) for dtype in (torch.float32, torch.float16))
    assert exact.keys() == halves.keys()
    for name, gradient in exact.items():
        assert (halves[name] - gradient).norm() < 2**-7 * gradient.norm(), name
    plain = gradients_of(on, torch.float32, **without)
    changes = [(exact[name] - gradient).norm() / gradient.norm() for name, gradient in plain.items()]
    assert max(changes) > 2**-4


@pytest.mark.parametrize("on", [fsdp2(), megatron(dp=1)], ids=["fsdp2", "megatron"])
def test_improbable_tokens_keep_their_gradients(on: FSDP2 | Megatron) -> None:
    """The gradient of the head, which is computed in the forward pass, is scaled before it is rounded."""
    head = gradients_of(on, torch.float16, family="wide")["lm_head.weight"]
    assert bool(head.any(dim=1).all())
