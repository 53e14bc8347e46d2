"""The outcome of each job of a sweep, one JSON file per job in ``<sweep folder>/jobs``."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from components.atomic_write import write_atomic

SWEEP_FOLDER = "RUNNER_SWEEP"
"""Environment variable with the sweep folder, for every job of a sweep on any machine."""

Status = Literal["running", "done", "refused", "failed", "stopped", "pruned"]
"""``refused``: a mistake was found before the run started. ``stopped``: by a signal or ``run.max_time``."""


@dataclass(frozen=True)
class Outcome:
    number: int
    overrides: tuple[str, ...]
    """All overrides of the job, including those that every job of the sweep has."""
    status: Status
    folder: str | None = None
    """The run folder. None means that the job has none, for example because it was refused."""
    loss: float | None = None
    """The final loss: eval, else train."""
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Point:
    """One job's place in a sweep."""

    sweep: Path
    number: int
    overrides: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.sweep / "jobs" / f"{self.number}.json"

    def write(self, outcome: Outcome) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(asdict(outcome), indent=2) + "\n")

    def began(self, folder: Path | None = None) -> None:
        """Record that the job runs, in the run folder ``folder`` if it exists already."""
        at = None if folder is None else str(folder)
        self.write(Outcome(self.number, self.overrides, "running", folder=at))

    def ended(
        self, status: Status, *, loss: float | None = None, error: str | None = None, seconds: float
    ) -> None:
        known = read_outcome(self.path)
        self.write(replace(known, status=status, loss=loss, error=error, seconds=seconds))


def read_outcome(path: Path) -> Outcome:
    fields = json.loads(path.read_text())
    return Outcome(**fields | {"overrides": tuple(fields["overrides"])})


def read_outcomes(sweep: Path) -> list[Outcome]:
    """Return the outcomes of the jobs that have begun, by number."""
    found = [read_outcome(path) for path in (sweep / "jobs").glob("*.json")]
    return sorted(found, key=lambda outcome: outcome.number)


def varied(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Return for each job the overrides that are not common to all jobs."""
    common = set.intersection(*(set(o.overrides) for o in outcomes)) if len(outcomes) > 1 else set()
    return [tuple(word for word in o.overrides if word not in common) for o in outcomes]


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the completed run with the lowest loss. None means that there is none."""
    done = [outcome for outcome in outcomes if outcome.status == "done" and outcome.loss is not None]
    return min(done, key=lambda outcome: outcome.loss or 0.0, default=None)
