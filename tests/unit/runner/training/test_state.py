"""The condition under which the loss of a step is a spike."""

import math

import pytest

from runner.training.state import TrainState


def advanced(losses: list[float], skipped: bool = False) -> TrainState:
    state = TrainState()
    for loss in losses:
        state.advance(num_samples=1, num_tokens=1, skipped=skipped, loss=loss)
    return state


def test_the_running_mean_weighs_the_newest_by_a_tenth() -> None:
    assert advanced([2.0] * 9).max_loss(3.0) == math.inf
    assert advanced([2.0] * 10).max_loss(3.0) == pytest.approx(6.0)
    assert advanced([2.0] * 9 + [4.0]).max_loss(3.0) == pytest.approx(3 * 2.2)
    assert advanced([2.0] * 10).max_loss(None) == math.inf


def test_skipped_steps_are_not_in_it() -> None:
    assert advanced([math.nan] * 12, skipped=True).max_loss(3.0) == math.inf
    state = advanced([2.0] * 10)
    state.advance(num_samples=1, num_tokens=1, skipped=True, loss=100.0)
    assert state.max_loss(3.0) == pytest.approx(6.0)
    assert (state.step, state.skipped, state.skipped_in_a_row) == (11, 1, 1)


def test_no_multiple_of_a_loss_below_zero_is_a_spike() -> None:
    assert advanced([-2.0] * 10).max_loss(3.0) == math.inf


def test_the_mean_of_an_interval_leaves_out_losses_that_are_not_finite() -> None:
    state = advanced([2.0, math.nan, 4.0, math.inf])
    assert state.interval_mean() == 3.0
    state.begin_interval()
    assert math.isnan(state.interval_mean())
