"""The end of an evaluation that was stopped: it has no result, so its exit code is not 0."""

from collections.abc import Callable

import pytest

from components.contracts.errors import DONE, INTERRUPTED, TrainingError
from runner.launch import slurm_env
from runner.launch.run import end_evaluation
from runner.records.run_record import Stopped


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


def test_its_time_is_up() -> None:
    with pytest.raises(TrainingError, match=r"run\.max_time: the evaluation is not complete"):
        end_evaluation(Stopped(4, 4, "run.max_time"))
