"""Schedules equal those of transformers and Megatron at every step of a 100-step run."""

import warnings
from typing import Any

import pytest
import torch
import transformers

from components.contracts.errors import ConfigError
from components.schedulers import WSD, Constant, Cosine, CosineMinLR, InverseSqrt, Linear, Scheduler

PEAK, STEPS = 3e-3, 100


def ours(scheduler: Scheduler, steps: int = STEPS) -> list[float]:
    return [scheduler.lr(step, peak=PEAK, total_steps=STEPS) for step in range(steps)]


def theirs_transformers(name: str, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = getattr(transformers, name)(optimizer, **settings)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def theirs_megatron(style: str, *, warmup: int, end: int, min_lr: float = 0.0, **wsd: Any) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduling = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = scheduling.OptimizerParamScheduler(
        optimizer, 0.0, PEAK, min_lr, warmup, end, style, 0.0, 0.0, STEPS, "constant", **wsd
    )
    rates = []
    for _ in range(STEPS + 20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return rates


WARM = {"num_warmup_steps": 10}
RUN = {**WARM, "num_training_steps": STEPS}
MIN = {"min_lr": 3e-4}
TRANSFORMERS = [
    (Constant(10), "get_constant_schedule_with_warmup", WARM),
    (Constant(), "get_constant_schedule", {}),
    (Linear(warmup_ratio=0.1), "get_linear_schedule_with_warmup", RUN),
    (Cosine(warmup_ratio=0.091), "get_cosine_schedule_with_warmup", RUN),
    (InverseSqrt(warmup_ratio=0.1), "get_inverse_sqrt_schedule", WARM),
    (Linear(10), "get_linear_schedule_with_warmup", RUN),
    (Linear(10, decay_steps=40), "get_linear_schedule_with_warmup", {**WARM, "num_training_steps": 50}),
    (Linear(), "get_linear_schedule_with_warmup", {"num_warmup_steps": 0, "num_training_steps": STEPS}),
    (Cosine(10), "get_cosine_schedule_with_warmup", RUN),
    (CosineMinLR(10), "get_cosine_with_min_lr_schedule_with_warmup", {**RUN, "min_lr_rate": 0.1}),
    (CosineMinLR(10, min_lr=1e-4), "get_cosine_with_min_lr_schedule_with_warmup", {**RUN, "min_lr": 1e-4}),
    (InverseSqrt(10), "get_inverse_sqrt_schedule", WARM),
    (
        WSD(10, decay_style="linear"),
        "get_wsd_schedule",
        {**RUN, "num_decay_steps": 10, "decay_type": "linear"},
    ),
    (WSD(10, 20, decay_style="cosine"), "get_wsd_schedule", {**RUN, "num_decay_steps": 20}),
    (WSD(10, 90), "get_wsd_schedule", {**RUN, "num_decay_steps": 90, "decay_type": "1-sqrt"}),
]


@pytest.mark.parametrize(("scheduler", "name", "settings"), TRANSFORMERS, ids=str)
def test_equals_transformers(scheduler: Scheduler, name: str, settings: dict[str, Any]) -> None:
    assert ours(scheduler) == pytest.approx(theirs_transformers(name, **settings), rel=1e-12, abs=1e-18)


MEGATRON = [
    (Constant(10), "constant", {"warmup": 10, "end": STEPS}),
    (Linear(10, min_lr=3e-4), "linear", {"warmup": 10, "end": STEPS, **MIN}),
    (Linear(10, decay_steps=40, min_lr=3e-4), "linear", {"warmup": 10, "end": 50, **MIN}),
    (Cosine(10), "cosine", {"warmup": 10, "end": STEPS}),
    (Cosine(0, decay_steps=70, min_lr=3e-4), "cosine", {"warmup": 0, "end": 70, **MIN}),
    (CosineMinLR(10), "cosine", {"warmup": 10, "end": STEPS, **MIN}),
    (InverseSqrt(10), "inverse-square-root", {"warmup": 10, "end": 1000}),
    (InverseSqrt(0), "inverse-square-root", {"warmup": 0, "end": 1000}),
    (InverseSqrt(10, 50, 1.5e-3), "inverse-square-root", {"warmup": 10, "end": 60, "min_lr": 1.5e-3}),
    *(
        (
            WSD(10, decay, 3e-4, style),
            "WSD",
            {"warmup": 10, "end": STEPS, **MIN, "wsd_decay_steps": decay, "lr_wsd_decay_style": style},
        )
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
        for decay in (20, 90)
    ),
]


@pytest.mark.parametrize(("scheduler", "style", "settings"), MEGATRON, ids=str)
def test_equals_megatron_also_past_the_end(
    scheduler: Scheduler, style: str, settings: dict[str, Any]
) -> None:
    expected = theirs_megatron(style, **settings)
    assert ours(scheduler, STEPS + 20) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_without_a_decay_the_rate_stays() -> None:
    """The first part of a run that other runs continue with a decay."""
    scheduler = WSD(2, decay_steps=0)
    scheduler.check(peak=PEAK, total_steps=STEPS)
    assert ours(scheduler) == pytest.approx(ours(Constant(2)))


def test_the_default_floor_of_cosine_min_lr_is_a_tenth_of_the_peak() -> None:
    assert CosineMinLR().lr(STEPS, peak=PEAK, total_steps=STEPS) == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("kind", [Constant, Linear, Cosine, CosineMinLR, InverseSqrt, WSD])
def test_a_run_that_is_all_warmup_has_a_rate_at_every_step(kind: type[Scheduler]) -> None:
    scheduler = kind(STEPS) if kind is not WSD else WSD(STEPS, 0)
    scheduler.check(peak=PEAK, total_steps=STEPS)
    assert ours(scheduler) == pytest.approx([PEAK * step / STEPS for step in range(STEPS)])


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        (Constant, {"warmup_steps": -1}, "scheduler.warmup_steps"),
        (Constant, {"warmup_ratio": 1.5}, "scheduler.warmup_ratio: must be a share"),
        (Linear, {"warmup_steps": 3, "warmup_ratio": 0.1}, "both are given; set one of them to 0"),
        (Cosine, {"decay_steps": -5}, "scheduler.decay_steps"),
        (Linear, {"min_lr": -1e-5}, "scheduler.min_lr"),
        (WSD, {"min_lr": float("nan")}, "scheduler.min_lr"),
        (InverseSqrt, {"min_lr": float("inf")}, "scheduler.min_lr"),
    ],
)
def test_refuses_impossible_values(kind: type[Scheduler], settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        kind(**settings)


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        (Linear(STEPS + 1), "scheduler.warmup_steps: is 101, but the run has 100 steps"),
        (Cosine(min_lr=2 * PEAK), "scheduler.min_lr: is 0.006, above optimizer.lr=0.003"),
        (WSD(50, 51), "scheduler.decay_steps: 51 after 50 of warmup"),
        (WSD(95), "scheduler.decay_steps: 10 after 95 of warmup"),
        (WSD(warmup_ratio=0.95), "scheduler.decay_steps: 10 after 95 of warmup"),
    ],
)
def test_check_refuses_what_does_not_fit_the_run(scheduler: Scheduler, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        scheduler.check(peak=PEAK, total_steps=STEPS)


def test_check_accepts_what_fits() -> None:
    WSD(50, 50, min_lr=PEAK).check(peak=PEAK, total_steps=STEPS)
    Linear(10, decay_steps=10_000).check(peak=PEAK, total_steps=STEPS)
