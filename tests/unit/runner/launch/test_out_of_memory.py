"""The advice of preflight is added to out-of-memory errors of training, and never hides them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.contracts.errors import ConfigError, StepOutOfMemory, TrainingError
from runner.launch import out_of_memory


def fails(error: Exception) -> Callable[..., str]:
    def advise(*_: object) -> str:
        raise error

    return advise


def message(
    advise: Callable[..., str], monkeypatch: pytest.MonkeyPatch, *, evaluates: bool = False
) -> TrainingError:
    """Return the error of a run out of memory for which ``advise`` is asked."""
    monkeypatch.setattr(out_of_memory, "advise", advise)
    launch: Any = SimpleNamespace(experiment=SimpleNamespace(run=SimpleNamespace(evaluate_only=evaluates)))
    with pytest.raises(StepOutOfMemory) as raised, out_of_memory.advising(launch, Path()):
        raise StepOutOfMemory("step 3: out of memory")
    return raised.value


def test_advice_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = message(lambda *_: "Take less.", monkeypatch)
    assert str(error) == "step 3: out of memory\nTake less."


@pytest.mark.parametrize(
    "advise", [lambda *_: "", fails(ConfigError("gone")), fails(MemoryError()), fails(FileNotFoundError())]
)
def test_without_advice_the_error_is_that_of_the_run(
    advise: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(message(advise, monkeypatch)) == "step 3: out of memory"


def test_an_evaluation_gets_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(message(fails(AssertionError()), monkeypatch, evaluates=True)) == "step 3: out of memory"
