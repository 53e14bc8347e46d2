"""The logger that writes metrics.jsonl."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from components.loggers.base import Row, RunInfo, RunResult


class JsonlLogger:
    """A writer of one JSON object per line, flushed at once. Numbers that are not finite become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        finite = {key: value if is_finite(value) else None for key, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def log_table(self, name: str, rows: Sequence[Mapping[str, str]], step: int) -> None:
        """Do nothing: the run folder holds what the table shows."""

    def finish(self, ending: RunResult) -> None:  # noqa: ARG002  the rows contain everything
        self._file.close()


@dataclass(frozen=True)
class Jsonl:
    """``metrics.jsonl``. A resumed run appends to it, after the rows up to its checkpoint."""

    def check(self) -> None:
        """Do nothing: there are no requirements."""

    def open(self, start: RunInfo) -> JsonlLogger:
        return JsonlLogger(start.folder / "metrics.jsonl")


def is_finite(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)
