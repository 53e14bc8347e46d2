"""When an evaluation is due, and one that a stop has put off, after the checkpoint of its step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.checkpoint.folder import best_checkpoint, step_folder
from runner.signals import SignalHandler
from runner.training import loop
from runner.training.state import TrainState
from runner.training.stop import StopPolicy
from tests.unit.components.checkpoint.test_manager import FakeEngine, policy


def test_its_checkpoint_learns_that_it_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is the last one of the run, so that no later checkpoint is written."""
    checkpoints, engine = policy(tmp_path, keep_best=True), FakeEngine()
    state = TrainState(step=3, best=2.0, best_step=1, owes_evaluation=True)
    checkpoints.save(engine, state)  # type: ignore[arg-type]

    def evaluate(t: Any) -> None:
        t.state.owes_evaluation = False
        t.state.best, t.state.best_step = 1.0, 3
        requests.add("save")

    requests = {"evaluate"}
    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "save_checkpoint", lambda t: t.checkpoints.save(t.engine, t.state))
    hooks = SimpleNamespace(stop=False, take=lambda what: what in requests and not requests.discard(what))
    t: Any = SimpleNamespace(
        state=state, engine=engine, checkpoints=checkpoints, hooks=hooks, stop=SimpleNamespace(reason=None)
    )
    t.train_data, t.run = SimpleNamespace(num_steps=3), SimpleNamespace(eval_on_start=False)
    loop.take_steps(t)
    assert best_checkpoint(tmp_path / "checkpoints") == step_folder(tmp_path / "checkpoints", 3)
    assert requests == {"evaluate"}, "its request is not left for the next step"
    assert TrainState.read(step_folder(tmp_path / "checkpoints", 3)) == state


@pytest.mark.parametrize(("fails", "expected_s"), [(False, 0), (True, 600)])
def test_a_save_that_writes_nothing_says_nothing_of_the_next(
    tmp_path: Path, fails: bool, expected_s: float
) -> None:
    checkpoints = policy(tmp_path, on_error="continue")
    t: Any = SimpleNamespace(checkpoints=checkpoints, state=TrainState(step=8), engine=FakeEngine())
    t.hooks, t.watchdog = SimpleNamespace(tensors=dict), SimpleNamespace(beat=str)
    t.stop = StopPolicy(lambda value: value, SignalHandler(str), save_s=600)
    if fails:
        (tmp_path / "checkpoints").write_text("a file in place of the folder")
    loop.save_checkpoint(t)
    assert t.stop.estimated_save == expected_s
    t.stop.estimated_save = 600
    loop.save_checkpoint(t)  # the second time, the checkpoint is there
    assert t.stop.estimated_save == 600


@pytest.mark.parametrize(
    ("evaluated", "steps", "owed"), [(None, 8, True), (4, 8, True), (8, 8, False), (4, 9, False)]
)
def test_a_run_that_ends_where_it_resumes_is_evaluated(evaluated: Any, steps: int, owed: bool) -> None:
    t: Any = SimpleNamespace(state=TrainState(step=8, evaluated_step=evaluated), eval_data={"eval": 0})
    t.run, t.train_data = SimpleNamespace(eval_at_end=True), SimpleNamespace(num_steps=steps)
    assert loop.ends_unevaluated(t) == owed


@pytest.mark.parametrize(("cadence", "first"), [(0.07, 7), (0.071, 8), (1e-9, 1), (3, 3), (0, 0)])
def test_a_cadence_may_be_a_share_of_the_run(cadence: float, first: int) -> None:
    assert next((step for step in range(1, 101) if loop.every(cadence, step, 100)), 0) == first


@pytest.mark.parametrize(("steps", "every"), [([2, 3, 4, 5, 6], 1), ([3, 5, 6], 2), ([5], 4), ([], 0)])
def test_a_step_may_be_longer_than_an_epoch(steps: list[int], every: int) -> None:
    """It completes the epoch of the cadence also if it ends in a later one."""
    epochs = [0.0, 0.9, 1.2, 2.0, 3.1, 5.0, 6.3]
    t: Any = SimpleNamespace(train_data=SimpleNamespace(num_steps=6, epoch=epochs.__getitem__))
    assert [step for step in range(1, 7) if loop.is_due(t, step, 0, every)] == steps
