"""This runner as a user starts it, but for a logger that also writes the events of a benchmark.

``python -m runner ... logger._target_=benchmarks.peers.ours.BenchLogger``
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.events import Events
from components.loggers import Jsonl, Logger, MultiLogger, Row


class EventLogger:
    """One event for every logged step; evaluations leave none."""

    def __init__(self) -> None:
        self._events = Events()

    def log(self, row: Row) -> None:
        if "train/loss" in row:
            tokens, labels = int(row["train/num_tokens"] or 0), int(row["train/num_labels"] or 0)
            self._events.step(tokens=tokens, labels=labels, loss=float(row["train/loss"] or 0))

    def close(self) -> None:
        """Every event is on disk."""


@dataclass(frozen=True)
class BenchLogger:
    """metrics.jsonl, and events in BENCH_OUT."""

    def check(self) -> None:
        """Nothing can be missing."""

    def open(self, run_dir: Path, config: Mapping[str, Any]) -> Logger:
        return MultiLogger(EventLogger(), Jsonl().open(run_dir, config))
