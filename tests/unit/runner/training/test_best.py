"""The best evaluation so far, and the number of evaluations without an improvement."""

import math

import pytest

from runner.training.state import TrainState


def evaluate(state: TrainState, *values: float, mode: str = "min", metric: str = "eval/loss") -> list[bool]:
    improved = []
    for value in values:
        state.step += 1
        improved.append(state.evaluated({metric: value}, metric, mode))
    return improved


@pytest.mark.parametrize("mode", ["min", "max"])
def test_only_what_is_better_improves(mode: str) -> None:
    sign, state = 1 if mode == "min" else -1, TrainState()
    values = [sign * value for value in (3.0, 2.0, 2.0, 2.5)]
    assert evaluate(state, *values, mode=mode) == [True, True, False, False]
    assert (state.best, state.best_step, state.evals_since_best) == (2.0 * sign, 2, 2)
    assert evaluate(state, sign * 1.0, mode=mode) == [True]
    assert (state.best_step, state.evals_since_best) == (5, 0)


def test_what_is_not_finite_is_never_the_best() -> None:
    state = TrainState()
    assert evaluate(state, math.nan, -math.inf, 5.0) == [False, False, True]


def test_it_survives_a_resume_of_the_same_metric() -> None:
    state = TrainState()
    evaluate(state, 2.0, 3.0)
    resumed = TrainState(**vars(state))
    assert evaluate(resumed, 2.5) == [False]
    assert resumed.evals_since_best == 2
    assert evaluate(resumed, 0.1, metric="eval/accuracy", mode="max") == [True], "another metric begins anew"


def test_an_older_state_reads() -> None:
    assert TrainState(step=3, num_samples=1, num_tokens=2, skipped=0, skipped_in_a_row=0).best is None
