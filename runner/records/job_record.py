"""The outcome of each job of a sweep, one JSON file per job in ``<sweep folder>/jobs``."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from components.atomic_write import write_atomic
from components.contracts.errors import TrainingError
from components.contracts.json_types import Json
from components.contracts.status import JobStatus, current_status
from components.json_text import as_type, parse_json
from components.yaml_text import parse_yaml

SWEEP_FOLDER = "RUNNER_SWEEP"
"""Environment variable with the path of the sweep folder. It is set for every job of a sweep."""


@dataclass(frozen=True)
class JobRecord:
    number: int
    overrides: tuple[str, ...]
    """All overrides of the job, including those that every job of the sweep has."""
    status: JobStatus
    folder: str | None = None
    """The run folder. None means that there is none, for example because the job was refused."""
    loss: float | None = None
    """The final evaluation loss, or else training loss. None means that neither is known."""
    error: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep: the folder of the sweep, and the number and the overrides of the job."""

    sweep: Path
    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...] = ()
    """Those of the overrides whose keys the sweep varies."""

    @property
    def path(self) -> Path:
        return self.sweep / "jobs" / f"{self.number}.json"

    def write(self, record: JobRecord) -> None:
        """Replace the record of the job.

        Raises:
            TrainingError: if it cannot be written, for example because the disk is full.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(asdict(record), indent=2) + "\n")
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written: {error.strerror}.") from error

    def mark_running(self, folder: Path | None = None) -> None:
        """Record that the job is running, with its run folder ``folder`` if that exists already."""
        at = None if folder is None else str(folder)
        self.write(JobRecord(self.number, self.overrides, "running", folder=at))

    def is_first_with(self, audit: str) -> bool:
        """Return whether this is the first call in the sweep, of any job, with this ``audit`` of the data."""
        asked = self.sweep / "audits" / hashlib.sha256(audit.encode()).hexdigest()
        asked.parent.mkdir(parents=True, exist_ok=True)
        try:
            asked.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def finish(
        self, status: JobStatus, *, loss: float | None = None, error: str | None = None, seconds: float
    ) -> None:
        known = read_job_record(self.path)
        self.write(replace(known, status=status, loss=loss, error=error, seconds=seconds))


def read_job_record(path: Path) -> JobRecord:
    """Return the record in ``path``; if it cannot be read, return a failed one with the reason."""
    try:
        fields = as_type(Json, parse_json(path.read_text()))
        return as_type(JobRecord, fields | {"status": current_status(fields.get("status"))})
    except (OSError, ValueError) as error:
        return JobRecord(int(path.stem), (), "failed", error=f"{path} cannot be read: {error}")


def read_job_records(sweep: Path) -> list[JobRecord]:
    """Return the records of the jobs that have begun, sorted by job number."""
    paths = (sweep / "jobs").glob("*.json")
    found = [read_job_record(path) for path in paths if path.stem.isdecimal()]
    return sorted(found, key=lambda record: record.number)


def varied_overrides(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Return, for each job, those of its overrides that not all jobs have."""
    common = set.intersection(*(set(o.overrides) for o in records)) if len(records) > 1 else set()
    return [tuple(word for word in o.overrides if word not in common) for o in records]


def are_comparable(records: Sequence[JobRecord]) -> bool:
    """Return whether all jobs with a loss have the same stage, with the same options of ``stage``.

    ``stage.reference`` does not matter, because all sources of a reference give the same log-probabilities.
    The stage may also come from the file of an ``experiment``.
    """
    stages = set()
    for record in (record for record in records if record.loss is not None):
        options = dict(word.lstrip("+").partition("=")[::2] for word in record.overrides)
        own = {key: value for key, value in options.items() if key.partition(".")[0] == "stage"}
        if "experiment" in options:
            own["experiment"] = composed_stage(record) or options["experiment"]
        stages.add(frozenset((key, value) for key, value in own.items() if key != "stage.reference"))
    return len(stages) < 2


def composed_stage(record: JobRecord) -> str:
    """Return the options of the stage in the job's run folder, as text; "" if they cannot be read."""
    try:
        config = parse_yaml(Path(str(record.folder), "config.yaml").read_text(encoding="utf-8"))
        stage = config["stage"]
        return str(sorted((key, value) for key, value in stage.items() if key != "reference"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return ""


def best(records: Sequence[JobRecord]) -> JobRecord | None:
    """Return the record of the completed job with the lowest loss.

    None means that there is none, or that the losses of the jobs are not comparable.
    """
    if not are_comparable(records):
        return None
    done = [record for record in records if record.status == "completed" and record.loss is not None]
    return min(done, key=lambda record: record.loss or 0.0, default=None)
