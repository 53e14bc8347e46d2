"""The sentence about a default learning rate that is too large for weights that are already trained."""

from types import SimpleNamespace
from typing import Any

import pytest

from runner.config.sources import ConfigSources
from runner.launch.checks import large_rate


@pytest.mark.parametrize(
    ("overrides", "random", "evaluates", "printed"),
    [
        ((), False, False, True),
        (("optimizer.lr=1e-3",), False, False, False),
        ((), True, False, False),
        ((), False, True, False),
    ],
)
def test_it_is_printed_only_if_trained_weights_continue_with_the_default(
    overrides: tuple[str, ...], random: bool, evaluates: bool, printed: bool
) -> None:
    experiment: Any = SimpleNamespace(
        run=SimpleNamespace(evaluate_only=evaluates),
        model=SimpleNamespace(is_random_init=random),
        optimizer=SimpleNamespace(lr=1e-3),
    )
    sentences = large_rate(experiment, ConfigSources(overrides=overrides))
    assert [sentence.partition(";")[0] for sentence in sentences] == printed * [
        "optimizer.lr=0.001 suits new models"
    ]
