"""Signals and failures while a run ends: the report is finished, and rank 0 closes its trackers."""

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from components.contracts.errors import TrainingError
from runner.config.sources import ConfigSources
from runner.launch import run, slurm_env
from runner.launch.spawn import wait_for_ranks
from runner.records.failures import failure_path, read_failure_report, report_failure
from runner.records.job_record import SweepJob, read_job_record
from runner.records.run_record import RunRecord, Stopped, recording_end
from runner.records.run_summary import Results
from runner.signals import SignalHandler, handling
from runner.sweeps.sweep import run_point


@pytest.mark.parametrize("signals", [0, 1])
def test_a_first_signal_does_not_interrupt_the_report(tmp_path: Path, signals: int) -> None:
    """The run is completed, also for a sweep, which begins no other job."""
    RunRecord(results=Results(last={"train/loss": 2.5})).write(tmp_path)
    point = SweepJob(tmp_path / "sweep", 1, ())

    def train() -> float:
        point.mark_running(tmp_path)
        with run.ending(tmp_path, None) as late_signal, handling(late_signal):  # type: ignore[arg-type]
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
            return 2.5

    with pytest.raises(SystemExit, match="0") if signals else nullcontext():
        assert run_point(point, train, lambda error: pytest.fail(str(error))) == 2.5
    assert RunRecord.read(tmp_path).ended == "completed"
    job = read_job_record(point.path)
    assert (job.status, job.loss) == ("completed", 2.5)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_job_begins_after_a_signal_in_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    launch: Any = SimpleNamespace(world_size=processes, resources=nullcontext(), console=None, notes=())
    modes = {"preflight": SimpleNamespace(mode="check"), "run": SimpleNamespace(max_restarts=0)}
    launch.experiment = SimpleNamespace(**modes)
    monkeypatch.setattr(run, "check_launch", lambda *_: launch)
    monkeypatch.setattr(run, "prepare", lambda _: tmp_path)
    monkeypatch.setattr(run, "finish", lambda *_: 2.5)
    for train in ("run_rank", "run_with_restarts"):
        monkeypatch.setattr(run, train, lambda *_: signal.SIGTERM)
    RunRecord().write(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        run.run({}, ConfigSources(), (), 0.0)
    assert RunRecord.read(tmp_path).ended == "completed"


def test_a_hang_of_the_only_rank_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, ended = SweepJob(tmp_path / "sweep", 1, ()), list[object]()
    launch: Any = SimpleNamespace(world_size=1, resources=nullcontext(), console=None, notes=(), began=0.0)
    modes = {"preflight": SimpleNamespace(mode="check"), "run": SimpleNamespace(max_restarts=0)}
    launch.experiment, launch.where = SimpleNamespace(**modes), ConfigSources(sweep_job=job)

    def end_process(error: TrainingError) -> NoReturn:
        found = RunRecord.read(tmp_path)
        ended.append((found.ended, found.error, found.results.last))
        raise error

    monkeypatch.setattr(run, "check_launch", lambda *_: launch)
    monkeypatch.setattr(run, "prepare", lambda _: tmp_path)
    monkeypatch.setattr(run, "end_process", end_process)
    monkeypatch.setattr(run, "run_rank", lambda _, give_up: give_up(TrainingError("no progress")))
    RunRecord().write(tmp_path)
    row = {"step": 3, "train/loss": 2.5}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(row)}\n{{"step": 4, "train')
    (tmp_path / "logs").mkdir()
    job.mark_running(tmp_path)
    with pytest.raises(TrainingError, match="no progress"):
        run.run({}, ConfigSources(), (), 0.0)
    assert ended == [("failed", "no progress", row)]
    assert read_failure_report(failure_path(tmp_path, 0)).stalled
    assert read_job_record(job.path).status == "failed"


@pytest.mark.parametrize(
    ("recorded", "rows", "newest"),
    [
        ({}, [{"step": 4, "train/loss": 2.5}, {"step": 4, "eval/loss": 3.0}], "both rows"),
        ({"step": 6, "train/loss": 2.0}, [{"step": 4, "train/loss": 2.5}], "recorded"),
        ({"eval/loss": 3.0}, [], "recorded"),
    ],
)
def test_a_failed_run_records_its_newest_results(
    tmp_path: Path, recorded: dict[str, float], rows: list[dict[str, float]], newest: str
) -> None:
    """They are in metrics.jsonl if rank 0 was killed, and in run.json if no logger writes that file."""
    RunRecord(results=Results(last=recorded)).write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TrainingError), recording_end(tmp_path):
        raise TrainingError("rank 1 was killed by SIGKILL")
    found = RunRecord.read(tmp_path)
    expected = recorded if newest == "recorded" else rows[0] | rows[1]
    assert (found.ended, found.results.last) == ("failed", expected)


@pytest.mark.parametrize(("step", "queued"), [(0, True), (3, False)])
def test_a_job_that_has_nothing_to_save_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, queued: bool
) -> None:
    """The signal came in the evaluation before the first step. Later, a checkpoint should have been saved."""
    experiment = SimpleNamespace(run=SimpleNamespace(evaluate_only=False))
    RunRecord(final_step=step, stopped=Stopped(step, 9, "SIGUSR2")).write(tmp_path)
    asked: list[object] = []
    monkeypatch.setattr(slurm_env, "queue_again", asked.append)
    with pytest.raises((SystemExit, TrainingError)):
        run.finish(SimpleNamespace(experiment=experiment), tmp_path)  # type: ignore[arg-type]
    assert queued == bool(asked)


class Rank:
    """A process that ends with code 1 after so many calls of ``poll``."""

    def __init__(self, polls: int) -> None:
        self.left = polls

    def poll(self) -> int | None:
        self.left -= 1
        return 1 if self.left < 0 else None


@pytest.mark.parametrize("reported", [True, False])
def test_rank_0_has_time_for_its_trackers_after_its_failure(tmp_path: Path, reported: bool) -> None:
    (tmp_path / "logs").mkdir()
    if reported:
        report_failure(tmp_path, TrainingError("too many skipped steps"))
        first = read_failure_report(failure_path(tmp_path, 0))
        report_failure(tmp_path, OSError("later"))
        assert read_failure_report(failure_path(tmp_path, 0)) == first
        text = failure_path(tmp_path, 0).read_text()
        failure_path(tmp_path, 1).write_text(text.replace('"rank": 0', '"rank": 1'))
    ranks: Any = [Rank(9), Rank(0)]
    with pytest.raises(TrainingError, match="too many skipped" if reported else "rank 1 exited with code 1"):
        wait_for_ranks(tmp_path, ranks, SignalHandler(str))
    assert (ranks[0].left < 0) == reported
