"""The advice of preflight is added to out-of-memory errors of train steps, and never hides them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contracts.errors import ConfigError, StepOutOfMemory
from runner.launch import out_of_memory


def fails(error: BaseException) -> Callable[..., str]:
    def advise(*_: object) -> str:
        raise error

    return advise


def reported(advise: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the message of a run that is out of memory, and for which ``advise`` is asked."""
    monkeypatch.setattr(out_of_memory, "advise", advise)
    launch: Any = None
    with pytest.raises(StepOutOfMemory) as raised, out_of_memory.advising(launch, Path()):
        raise StepOutOfMemory("step 3: out of memory")
    return str(raised.value)


def test_advice_is_in_the_line_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a sweep shows only the last line of an error."""
    assert reported(lambda *_: "Take less.", monkeypatch) == "step 3: out of memory. Take less."


@pytest.mark.parametrize(
    "advise",
    [lambda *_: "", fails(ConfigError("gone")), fails(RuntimeError("full")), fails(KeyboardInterrupt())],
)
def test_without_advice_the_error_is_that_of_the_run(
    advise: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reported(advise, monkeypatch) == "step 3: out of memory"
