"""fp16 with a dynamic loss scale skips the steps and changes the scale as ``torch.amp.GradScaler`` does."""

from typing import Any

import pytest
import torch

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.moe_loss_config import MoELossConfig
from tests.distributed.cases import fsdp2, megatron
from tests.distributed.loss_scale_cases import Scaled, curve, curves, gradients_of, torch_curve
from tests.ranks import Ranks

SHARDED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, list[FSDP2 | Megatron]] = {
    "fsdp2": [fsdp2(2), fsdp2(tp=2), fsdp2(cp=2)],
    "megatron": [
        megatron(dp=2, **SHARDED),
        megatron(tp=2, dp=1, sequence_parallel=True),
        megatron(pp=2, dp=1),
        megatron(pp=2, vpp=2, dp=1),
        megatron(cp=2, dp=1),
    ],
}


@pytest.fixture(scope="module")
def expected() -> list[Scaled]:
    return torch_curve()


def assert_same(found: list[Scaled], expected: list[Scaled]) -> None:
    """Compare scales and skips exactly, and numbers up to some roundings of fp16, by 2**-11 each.

    The first norm that is finite is that of equal weights. Later ones follow updates by AdamW, which divides
    each gradient by its size, so that a rounded small gradient changes a weight by as much as a large one.
    """
    assert [(s.scale, s.skipped) for s in found] == [(s.scale, s.skipped) for s in expected]
    taken = 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=2**-11)
        if not theirs.skipped:
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2**-7 if taken else 2**-9)
            taken += 1


def test_scale_and_skips_are_those_of_torch(expected: list[Scaled]) -> None:
    skipped = [step.skipped for step in expected]
    assert skipped[:3] == [True] * 3
    assert 0 < sum(skipped[3:]) < len(skipped[3:])
    for on in (fsdp2(), megatron(dp=1)):
        assert_same(curve(on), expected)


@pytest.mark.parametrize("engine", LAYOUTS)
def test_every_layout_has_the_same_scale_and_skips(expected: list[Scaled], engine: str) -> None:
    ranks = Ranks(2, megatron=engine == "megatron")
    for of_rank in ranks.run(curves, LAYOUTS[engine], seconds=120):
        for found in of_rank:
            assert_same(found, expected)


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
