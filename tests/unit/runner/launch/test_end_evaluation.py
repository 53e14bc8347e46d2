"""The end of an evaluation that was stopped: it has no result, so its exit code is not 0."""

from collections.abc import Callable

import pytest

from components.contracts.errors import DONE, INTERRUPTED
from runner.launch import slurm_env
from runner.launch.run import end_evaluation
from runner.records.run_record import RunRecord, Stopped
from runner.training.rank import late_failure


@pytest.mark.parametrize(
    ("reason", "queue", "code"),
    [
        ("SIGINT", lambda _: pytest.fail("only SLURM's signals requeue a job"), INTERRUPTED),
        ("SIGTERM", lambda _: False, INTERRUPTED),
        ("SIGUSR2", lambda _: True, DONE),
    ],
)
def test_a_signal(
    monkeypatch: pytest.MonkeyPatch, reason: str, queue: Callable[[object], bool], code: int
) -> None:
    monkeypatch.setattr(slurm_env, "queue_again", queue)
    with pytest.raises(SystemExit) as ended:
        end_evaluation(Stopped(4, 4, reason))
    assert ended.value.code == code


@pytest.mark.parametrize(("reason", "fails"), [("run.max_time", True), ("SIGINT", False), (None, False)])
def test_only_the_time_limit_makes_it_a_failure(reason: str | None, fails: bool) -> None:
    record = RunRecord(stopped=None if reason is None else Stopped(4, 4, reason), final_step=4)
    failure = late_failure(record, None, evaluates=True)
    assert (failure or "").startswith("run.max_time: the evaluation is not complete") == fails
    assert (failure is not None) == fails
