"""Calls of hooks, their failures, and what they ask for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from components.contracts.errors import ConfigError, TrainingError
from components.contracts.hook import Hook, HookRun
from components.hooks import EMA, GradientStats, Samples
from runner.training.hooks import Hooks
from runner.training.state import TrainState


class Ranks:
    """An engine whose other ranks give the values ``others`` in turn, and 0 afterwards."""

    def __init__(self, others: Sequence[float] = ()) -> None:
        self.others = iter(others)

    def max_over_ranks(self, value: float) -> float:
        return max(value, next(self.others, 0.0))


class Asks(Hook):
    """Asks for ``requests`` after every step."""

    def __init__(self, *requests: Any, on_error: Any = "stop") -> None:
        super().__init__(on_error=on_error)
        self.requests, self.ended = requests, 0

    def after_step(self, run: HookRun, *_: object) -> None:
        for request in self.requests:
            run.ask(request)

    def end(self, _: HookRun, *, completed: bool) -> None:
        self.ended += completed


class Fails(Hook):
    def after_step(self, *_: object) -> None:
        raise ZeroDivisionError("no reason")


class Holds(Hook):
    """Gives checkpoints a tensor, or fails to."""

    def __init__(self, held: dict[str, torch.Tensor] | None, on_error: Any = "warn") -> None:
        super().__init__(on_error=on_error)
        self.held = held

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.held is None:
            raise ZeroDivisionError("no reason")
        return self.held


class AsksAndFails(Asks):
    def after_step(self, run: HookRun, *_: object) -> None:
        super().after_step(run)
        raise ZeroDivisionError


class Refuses(Hook):
    def after_step(self, *_: object) -> None:
        raise TrainingError("the disk is too slow.")


def hooks(engine: Ranks, own: dict[str, Hook] | None = None, **chosen: Hook) -> Hooks:
    run = HookRun(
        folder=Path("none"),
        is_main=True,
        engine=engine,  # type: ignore[arg-type]
        model=None,  # type: ignore[arg-type]
        adapter=None,
        dtype=torch.float32,
        seed=0,
        state=TrainState(step=7),
        num_steps=9,
        resumed_from=None,
        log=lambda _: None,
        log_table=lambda *_: None,
    )
    return Hooks(run, own or {}, chosen)


def test_each_hook_of_the_configuration_has_the_time_limit_for_itself() -> None:
    beats: list[str] = []
    two = hooks(Ranks(), {"own": Asks()}, first=Asks(), second=Asks())
    two.beat = beats.append
    two.call("after_step", None, None)
    before = [f"in after_step of hook.{name} at step 7" for name in ("first", "second")]
    assert beats == [*before, "after after_step of the hooks at step 7"]


def test_requests_are_taken_once_and_a_stop_stays() -> None:
    asked = hooks(Ranks(), mine=Asks("save", "stop"))
    assert (asked.take("save"), asked.stop) == (False, False)
    asked.call("after_step", None, None)
    assert (asked.take("save"), asked.take("save"), asked.take("evaluate")) == (True, False, False)
    assert asked.stop


def test_all_ranks_do_what_one_asks_for() -> None:
    """The other rank asks for something, then answers for an evaluation, a checkpoint and the end."""
    asked = hooks(Ranks([1.0, 0.0, 1.0, 0.0]), mine=Asks())
    asked.call("after_step", None, None)
    assert (asked.take("evaluate"), asked.take("save"), asked.stop) == (False, True, False)


def test_hooks_of_the_program_need_no_agreement() -> None:
    asked = hooks(Ranks([1.0, 1.0, 1.0, 1.0]), {"ours": Asks("save")})
    asked.call("after_step", None, None)
    assert (asked.take("save"), asked.take("evaluate"), asked.stop) == (True, False, False)


def test_a_failure_ends_the_run_with_the_name_of_the_hook() -> None:
    with pytest.raises(
        TrainingError, match=r"hook\.mine: after_step failed at step 7: ZeroDivisionError: no reason"
    ):
        hooks(Ranks(), mine=Fails()).call("after_step", None, None)
    with pytest.raises(TrainingError, match=r"^the disk is too slow\.$"):
        hooks(Ranks(), mine=Refuses(on_error="warn")).call("after_step", None, None)


@pytest.mark.parametrize(
    ("hook", "others", "said"),
    [(Fails(on_error="warn"), [0.0], "no reason"), (Hook(on_error="warn"), [1.0], "on another rank")],
    ids=["here", "elsewhere"],
)
def test_a_hook_is_left_out_on_all_ranks(
    hook: Hook, others: list[float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    last = Asks("save")
    called = hooks(Ranks(others), mine=hook, last=last)
    called.call("after_step", None, None)
    assert said in caplog.text
    assert "it is left out from here on" in caplog.text
    assert called.take("save"), "the others are still called"
    called.call("end", completed=True)
    assert ([name for name, _ in called.hooks], last.ended) == (["last"], 1)


def test_a_hook_whose_tensors_fail_is_named_or_left_out() -> None:
    with pytest.raises(
        TrainingError, match=r"hook\.mine: tensors failed at step 7: ZeroDivisionError: no re"
    ):
        hooks(Ranks(), mine=Holds(None, "stop")).tensors()
    value = torch.ones(1)
    here = hooks(Ranks(), mine=Holds(None), last=Holds({"x": value}))
    elsewhere = hooks(Ranks([1.0]), mine=Holds({"x": value}), last=Holds({"x": value}))
    for ranks in (here, elsewhere):
        assert ranks.tensors() == {"hook/last/x": value}, "checkpoints have the same keys on all ranks"
        assert [name for name, _ in ranks.hooks] == ["last"]


def test_ranks_agree_on_what_a_hook_asked_for_before_it_failed() -> None:
    """Otherwise one rank would save alone, and wait for the others in vain."""
    only_here = hooks(Ranks(), mine=AsksAndFails("save", on_error="warn"))
    only_here.call("after_step", None, None)
    # There it fails, and requests are made, which are not to evaluate, but to save.
    elsewhere = hooks(Ranks([1.0, 1.0, 0.0, 1.0]), mine=Hook(on_error="warn"))
    elsewhere.call("after_step", None, None)
    assert only_here.take("save")
    assert elsewhere.take("save")


def test_a_hook_with_the_name_of_one_of_the_program_replaces_nothing() -> None:
    ours, mine = Asks(), Asks()
    hooks(Ranks(), {"best_metric": ours}, best_metric=mine).call("end", completed=True)
    assert (ours.ended, mine.ended) == (1, 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EMA(decay=1.0), "hook.ema.decay: must be"),
        (lambda: GradientStats(every=0), "hook.gradient_stats.every: must be"),
        (
            lambda: Samples(prompts="p", max_new_tokens=0).check("s"),
            "hook.samples.max_new_tokens: must be",
        ),
        (lambda: Samples(prompts="/nowhere/prompts.jsonl").check("s"), "/nowhere/prompts.jsonl"),
    ],
)
def test_mistakes_are_named(make: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert said in str(error.value)
