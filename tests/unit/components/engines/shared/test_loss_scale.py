"""The loss scale follows torch.amp.GradScaler, down to a smallest scale."""

import math
import random

import pytest
import torch

from components.contracts.engine import LossScaling
from components.contracts.errors import NonRetryableError
from components.engines.shared.loss_scale import LossScale


@pytest.mark.parametrize(("initial", "interval"), [(2.0**40, 4), (1000.0 * 2**30, 1), (2.0**125, 1)])
def test_the_scale_is_that_of_torch(initial: float, interval: int) -> None:
    """One scale begins so high that torch does not double it into infinity."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=interval)
    scale = LossScale.build(LossScaling(initial, interval))
    assert scale is not None
    parameter, draw = torch.nn.Parameter(torch.zeros(2)), random.Random(0)
    optimizer = torch.optim.SGD([parameter])
    for _ in range(60):
        overflow = draw.random() < 0.3
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1.0, math.inf if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        scale.update(overflow=overflow, accepted=True)
        assert (scale.value, scale.steps) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_a_resumed_run_may_have_a_shorter_interval() -> None:
    scale = LossScale(1024.0, growth_interval=5, steps=12)
    scale.update(overflow=False, accepted=True)
    assert (scale.value, scale.steps) == (2048.0, 0)


def test_the_smallest_scale_ends_the_run() -> None:
    scale = LossScale(3.0, growth_interval=1)
    scale.update(overflow=True, accepted=True)
    assert scale.value == 1.5
    with pytest.raises(NonRetryableError, match=r"overflow in fp16 even with the loss scale 1\.5"):
        scale.update(overflow=True, accepted=True)


def test_a_loss_that_is_not_finite_does_not_end_the_run() -> None:
    scale = LossScale(1.5, growth_interval=1)
    for _ in range(2):
        scale.update(overflow=True, accepted=False)
    assert scale.value == 1.0
