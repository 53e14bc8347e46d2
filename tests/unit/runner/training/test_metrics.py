"""The reporter passes the end of a run to the loggers and keeps its last finite numbers."""

import logging
import math
from contextlib import suppress

import pytest
from rich.progress import Progress

from components.loggers import Row, RunResult
from components.losses import NextToken
from runner.launch.final_report import evaluation_facts, metric_facts
from runner.records.run_record import Stopped
from runner.records.run_summary import Results
from runner.training.metrics import MetricsReporter
from runner.training.state import TrainState


class Kept:
    """Loggers that keep all rows and endings."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.endings: list[RunResult] = []

    def log(self, row: Row) -> None:
        self.rows.append(row)

    def finish(self, ending: RunResult) -> None:
        self.endings.append(ending)


def ending_of(
    stopped: Stopped | None = None, error: BaseException | None = None, failure: str | None = None
) -> RunResult:
    kept = Kept()
    reporter = MetricsReporter(1, lambda _: 0.0, None, lambda: None, kept)  # type: ignore[arg-type]
    with suppress(RuntimeError, KeyboardInterrupt), reporter:
        reporter.evaluation(TrainState(step=7), {"eval/loss": 2.5})
        reporter.stopped, reporter.failure = stopped, failure
        if error is not None:
            raise error
    assert kept.rows == [{"step": 7, "eval/loss": 2.5}]
    (ending,) = kept.endings
    return ending


def test_loggers_are_told_how_it_ended() -> None:
    last = {"eval/loss": 2.5}
    assert ending_of() == RunResult("completed", last)
    assert ending_of(Stopped(7, 9, "SIGTERM")) == RunResult("interrupted", last, "SIGTERM")
    assert ending_of(error=KeyboardInterrupt()) == RunResult("interrupted", last, "interrupted")
    assert ending_of(error=RuntimeError("4711")) == RunResult("failed", last, "RuntimeError: 4711")
    assert ending_of(Stopped(7, 9, "SIGTERM"), failure="no checkpoint") == RunResult(
        "failed", last, "no checkpoint"
    )


def test_results_are_what_was_logged_last_and_is_finite() -> None:
    results = Results()
    assert math.isnan(results.final_loss())
    results.add({"step": 1, "train/loss": math.nan, "perf/mfu": None})
    results.add({"step": 2, "train/loss": 3.0, "perf/mfu": None})
    results.add({"step": 3, "train/loss": 2.0, "train/lr": 0.1})
    assert results.final_loss() == 2.0
    results.add({"step": 2, "eval/loss": 2.5})
    results.add({"step": 4, "train/loss": math.inf, "train/lr": 0.2})
    assert results.first == {"step": 2, "train/loss": 3.0}
    assert results.last == {"step": 3, "train/loss": 2.0, "train/lr": 0.2, "eval/loss": 2.5}
    assert results.final_loss() == pytest.approx(2.5)
    results.add({"step": 4, "eval/loss": math.nan, "eval/num_labels": 7})
    assert math.isnan(results.final_loss()), "an older evaluation is not the result"
    assert results.last == {"step": 3, "train/loss": 2.0, "train/lr": 0.2, "eval/num_labels": 7}
    results.add({"step": 5, "eval/loss": 2.25})
    assert results.final_loss() == pytest.approx(2.25)


def test_results_of_steps_that_are_taken_again_are_dropped() -> None:
    results = Results()
    for step in (2, 4):
        results.add({"step": step, "train/loss": 3.0, "eval/loss": math.nan})
    assert results.up_to(4) == results
    assert results.up_to(3) == Results(first={"step": 2, "train/loss": 3.0})
    assert results.up_to(1) == Results()
    assert metric_facts(results.up_to(3)) == {}


def test_every_evaluation_set_has_a_perplexity() -> None:
    losses = {"eval/loss": 2.0, "eval/a/loss": 1.0, "eval/b/loss": 3.0, "eval/b/nll": 2.5}
    facts = evaluation_facts(Results(last=losses), NextToken())
    found = {key: value for key, value in facts.items() if key.endswith("perplexity")}
    values = {"eval/perplexity": 2.0, "eval/a/perplexity": 1.0, "eval/b/perplexity": 2.5}
    assert found == {key: f"{math.exp(loss):.6g}" for key, loss in values.items()}


@pytest.mark.parametrize(
    ("evaluates", "shown"), [(True, "eval: loss 2.5000"), (False, "step 7  eval: loss 2.5000")]
)
def test_the_line_of_an_evaluation(evaluates: bool, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    """The bar of a run that only evaluates counts its batches."""
    progress = Progress()
    reporter = MetricsReporter(1, lambda _: 0.0, None, lambda: None, Kept(), progress)  # type: ignore[arg-type]
    if evaluates:
        reporter.start_evaluation(3)
    else:
        reporter.start(TrainState(step=7), 9)
    reporter.evaluated_batch()
    with caplog.at_level(logging.INFO, "runner"):
        reporter.evaluation(TrainState(step=7), {"eval/loss": 2.5})
    assert caplog.messages == [shown]
    (task,) = progress.tasks
    bar = (task.description, task.completed, task.total)
    assert bar == (("batch", 1, 3) if evaluates else ("step", 7, 9))
