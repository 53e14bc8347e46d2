"""How each job of a sweep ended: one small JSON file a job, in ``<sweep folder>/jobs``."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from components.atomic_write import write_atomic

SWEEP_FOLDER = "RUNNER_SWEEP"
"""In the environment of every job of a sweep, on whatever machine it runs."""

Status = Literal["running", "done", "refused", "failed", "stopped", "pruned"]
"""``refused``: a mistake that was found before anything started. ``stopped``: by a signal."""


@dataclass(frozen=True)
class JobRecord:
    number: int
    overrides: tuple[str, ...]
    """All of the job's, those that every job of the sweep has among them."""
    status: Status
    folder: str | None = None
    """The run's; None where it was refused before there was one."""
    loss: float | None = None
    """The final one: eval, else train."""
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class SweepJob:
    """One job's place in a sweep."""

    sweep: Path
    number: int
    overrides: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.sweep / "jobs" / f"{self.number}.json"

    def write(self, record: JobRecord) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(asdict(record), indent=2) + "\n")

    def mark_running(self, folder: Path | None = None) -> None:
        """The job runs, in ``folder`` where it has one already."""
        at = None if folder is None else str(folder)
        self.write(JobRecord(self.number, self.overrides, "running", folder=at))

    def finish(
        self, status: Status, *, loss: float | None = None, error: str | None = None, seconds: float
    ) -> None:
        known = read_job_record(self.path)
        self.write(replace(known, status=status, loss=loss, error=error, seconds=seconds))


def read_job_record(path: Path) -> JobRecord:
    fields = json.loads(path.read_text())
    return JobRecord(**fields | {"overrides": tuple(fields["overrides"])})


def read_job_records(sweep: Path) -> list[JobRecord]:
    """Of the jobs that have begun, by number."""
    found = [read_job_record(path) for path in (sweep / "jobs").glob("*.json")]
    return sorted(found, key=lambda record: record.number)


def varied_overrides(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Of each, the overrides that not all have in common."""
    common = set.intersection(*(set(o.overrides) for o in records)) if len(records) > 1 else set()
    return [tuple(word for word in o.overrides if word not in common) for o in records]


def best(records: Sequence[JobRecord]) -> JobRecord | None:
    """Of the runs that came to their end, the one with the lowest loss."""
    done = [record for record in records if record.status == "done" and record.loss is not None]
    return min(done, key=lambda record: record.loss or 0.0, default=None)
