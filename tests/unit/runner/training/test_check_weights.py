"""A run fails at its end if its weights are not finite or were not trained."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from components.contracts.errors import NonRetryableError
from runner.training.rank import check_weights
from runner.training.state import TrainState


@dataclass
class Engine:
    weights: dict[str, Tensor]
    elsewhere: float = 0.0
    """The value of another rank."""

    def tensors(self, *, model_only: bool) -> dict[str, Tensor]:
        assert model_only
        return self.weights

    def max_over_ranks(self, value: float) -> float:
        return max(value, self.elsewhere)


GOOD = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}


def test_finite_weights_of_some_steps_pass() -> None:
    check_weights(Engine(GOOD), TrainState(step=3, skipped=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    engine = Engine(GOOD | {"c": torch.tensor([0.0, value])})
    with pytest.raises(NonRetryableError, match="after step 3 some weights, such as c, are not finite"):
        check_weights(engine, TrainState(step=3))  # type: ignore[arg-type]


def test_every_rank_fails_with_the_one_that_has_it() -> None:
    with pytest.raises(NonRetryableError, match="some weights are not finite"):
        check_weights(Engine(GOOD, elsewhere=1.0), TrainState(step=3))  # type: ignore[arg-type]


def test_a_run_of_skipped_steps_has_trained_nothing() -> None:
    with pytest.raises(NonRetryableError, match="all 3 steps were skipped"):
        check_weights(Engine(GOOD), TrainState(step=3, skipped=3))  # type: ignore[arg-type]
