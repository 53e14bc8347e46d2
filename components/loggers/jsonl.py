"""metrics.jsonl"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from components.loggers.base import Row, RunInfo, RunResult


class JsonlLogger:
    """One flushed JSON object a line; a number that is not finite, which JSON has no word for, is null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        finite = {key: value if is_number(value) else None for key, value in row.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def finish(self, ending: RunResult) -> None:  # noqa: ARG002  the rows say it all
        self._file.close()


@dataclass(frozen=True)
class Jsonl:
    """``metrics.jsonl``; a run that goes on in its folder has left there the rows up to its checkpoint."""

    def check(self) -> None:
        """Nothing can be missing."""

    def open(self, start: RunInfo) -> JsonlLogger:
        return JsonlLogger(start.folder / "metrics.jsonl")


def is_number(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)
