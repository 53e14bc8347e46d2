"""This runner as a user starts it, with an additional logger for the events of a benchmark.

``python -m runner ... +logger.events._target_=benchmarks.baselines.ours.BenchLogger``
"""

from dataclasses import dataclass

from benchmarks.baselines.events import Events
from components.loggers import Row, RunInfo, RunResult


class EventLogger:
    """A logger that writes one event for each logged step and none for evaluations."""

    def __init__(self) -> None:
        self._events = Events()

    def log(self, row: Row) -> None:
        if "train/loss" in row:
            tokens, labels = int(row["train/num_tokens"] or 0), int(row["train/num_labels"] or 0)
            self._events.step(tokens=tokens, labels=labels, loss=float(row["train/loss"] or 0))

    def finish(self, ending: RunResult) -> None:
        """Do nothing, because all events are on disk."""


@dataclass(frozen=True)
class BenchLogger:
    """Logger that writes events to BENCH_OUT."""

    def check(self) -> None:
        """Do nothing: there are no requirements."""

    def open(self, start: RunInfo) -> EventLogger:  # noqa: ARG002
        return EventLogger()
