"""``run.json``: the record of a run, from its preparation to its end. Nothing here imports torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Self

from components.atomic_write import write_atomic
from components.contracts.device import DeviceKind
from components.contracts.errors import ConfigError, TrainingError
from components.contracts.json_types import Config, Json
from components.contracts.status import RunStatus, current_status
from components.json_text import as_type, parse_json
from runner.records.run_summary import Results

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Stopped:
    """The step at which a run stopped before its last step, and the reason."""

    step: int
    of: int
    """Number of steps of the whole run."""
    reason: str
    """Name of a signal, ``run.max_time``, or ``pruned``."""


@dataclass(frozen=True)
class JobFacts:
    """The SLURM job of a run."""

    job: str
    """Job id in the form of ``squeue``, such as ``17_2`` for a job of an array."""
    restarts: int
    """Number of times that SLURM has restarted the job."""


@dataclass(frozen=True)
class SweepPlace:
    """The sweep of a run, and the number of its job."""

    folder: str
    number: int
    swept: list[str] = field(default_factory=list)
    """The overrides of the job whose keys the sweep varies."""


@dataclass(frozen=True)
class ReferenceCache:
    """The cache folder of the reference model's log-probabilities."""

    folder: str
    compute: bool
    """Whether ranks must compute missing log-probabilities first."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of tensors on the device of the rank that needs the most. None means not known."""

    estimated: int | None = None
    """The forecast."""
    trial_step: int | None = None
    """The measured peak from the construction of the engine to the end of the trial step."""


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json. Fields that an older version did not write have their default values."""

    command: list[str] = field(default_factory=list)
    started: str = ""
    """Local time, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None
    began: float = 0.0
    """Start of the command, in seconds since the Unix epoch; ``run.max_time`` counts from it."""
    stopped: Stopped | None = None
    ended: RunStatus | None = None
    """Outcome of the run. None means that it has not ended, or was killed."""
    final_step: int | None = None
    """Completed steps at the end of training, before the export. None means that training has not ended."""
    restarts: int = 0
    world_size: int = 1
    device: DeviceKind = "cpu"
    error: str | None = None
    overrides: list[str] = field(default_factory=list)
    resumed_from: str | None = None
    """Absolute path of the checkpoint that the run has resumed from. None means a run from the start."""
    sweep: SweepPlace | None = None
    slurm: JobFacts | None = None
    identity: Json = field(default_factory=dict)
    """Fields of ``RunIdentity``."""
    reference: ReferenceCache | None = None
    auto_micro_batch_size: int | None = None
    """The size that is used for ``run.micro_batch_size=auto``. None means that the size was given."""
    peak_memory: PeakMemory = field(default_factory=PeakMemory)
    data: Json = field(default_factory=dict)
    """The input of ``data.restore``."""
    results: Results = field(default_factory=Results)
    engine_facts: Config = field(default_factory=dict)
    """The result of ``Engine.describe()``, with its keys at the top level of run.json.

    Keys that are also names of fields are left out there.
    """

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of the run in ``folder``.

        Raises:
            ConfigError: if the record is damaged, or was written by a later version.
        """
        path = folder / "run.json"
        try:
            return cls.from_json(as_type(Json, parse_json(path.read_text())))
        except ValueError as error:
            raise ConfigError(
                f"{path}: is damaged, or of a later version ({error}); restore it, or start a new run."
            ) from error

    @classmethod
    def from_json(cls, content: Config) -> Self:
        """Build the record from the content of run.json; raise ValueError if a field has another type."""
        own: Json = {f.name: content[f.name] for f in fields(cls) if f.name in content}
        own["ended"] = current_status(own.get("ended"))
        own["results"] = own.get("results") or {}
        return as_type(
            cls, own | {"engine_facts": {name: content[name] for name in content if name not in own}}
        )

    def to_json(self) -> Json:
        """Return the content of run.json."""
        own = asdict(self)
        facts = own.pop("engine_facts")
        return own | {name: facts[name] for name in facts if name not in own}

    def write(self, folder: Path) -> None:
        """Replace the run.json of ``folder``."""
        write_atomic(folder / "run.json", json.dumps(self.to_json(), indent=2) + "\n")

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the run has resumed from. None means a run from the start."""
        return None if self.resumed_from is None else Path(self.resumed_from)


def has_completed(checkpoint: Path) -> bool:
    """Return whether the run that wrote ``checkpoint`` has completed, including its export and report.

    A run without run.json, of which perhaps only the checkpoints were copied, counts as completed.
    """
    folder = checkpoint.absolute().parent.parent
    return not (folder / "run.json").is_file() or RunRecord.read(folder).ended == "completed"


def stop_reason(folder: str | None) -> str | None:
    """Return why the run in ``folder`` stopped early.

    None means that it did not, or that its record is missing, as that of a forecast, or damaged.
    """
    try:
        stopped = None if folder is None else RunRecord.read(Path(folder)).stopped
    except (ConfigError, FileNotFoundError):
        return None
    return None if stopped is None else stopped.reason


@contextmanager
def recording_end(folder: Path) -> Iterator[None]:
    """Record in run.json how the run in ``folder`` has ended, when the context is left.

    Raises:
        TrainingError: if the context raises an error and the folder, or its run.json, no longer exists.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not (folder / "run.json").exists():
            raise TrainingError(
                f"{folder}: was removed, or its run.json was, while the run was under way; start it again."
            ) from error
        with suppress(OSError):  # the failure may be that this disk is full
            record_failure(folder, error)
        raise
    record = RunRecord.read(folder)
    replace(record, ended="interrupted" if record.stopped else "completed", error=None).write(folder)


def record_failure(folder: Path, error: BaseException) -> None:
    """Record in run.json that ``error`` has ended the run in ``folder``, with the results until then.

    A rank that hangs or was killed has its results only in memory, and those in metrics.jsonl are newer.
    """
    record, failed = RunRecord.read(folder), isinstance(error, Exception)
    known = (record.results, logged_results(folder))
    replace(
        record,
        ended="failed" if failed else "interrupted",
        error=str(error) if failed else None,
        results=max(known, key=lambda results: (results.last.get("step", 0), len(results.last))),
    ).write(folder)


def logged_results(folder: Path) -> Results:
    """Return the results of the rows in metrics.jsonl, none if it does not exist.

    A last row that a kill has cut off is left out.
    """
    path, results = folder / METRICS, Results()
    for row in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if row.endswith("\n"):
            results.add(parse_json(row))
    return results
