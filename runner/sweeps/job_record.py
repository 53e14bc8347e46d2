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
class Outcome:
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
        """The job runs, in ``folder`` where it has one already."""
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
    """Of the jobs that have begun, by number."""
    found = [read_outcome(path) for path in (sweep / "jobs").glob("*.json")]
    return sorted(found, key=lambda outcome: outcome.number)


def varied(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Of each, the overrides that not all have in common."""
    common = set.intersection(*(set(o.overrides) for o in outcomes)) if len(outcomes) > 1 else set()
    return [tuple(word for word in o.overrides if word not in common) for o in outcomes]


def best(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Of the runs that came to their end, the one with the lowest loss."""
    done = [outcome for outcome in outcomes if outcome.status == "done" and outcome.loss is not None]
    return min(done, key=lambda outcome: outcome.loss or 0.0, default=None)
