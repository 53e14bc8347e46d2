"""Failure reports of ranks, and the search for the failure that came first."""

import contextlib
import errno
import json
import math
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from components.atomic_write import write_atomic
from components.contracts.errors import (
    DONE,
    ConfigError,
    NonRetryableError,
    StepOutOfMemory,
    TrainingError,
)
from components.json_text import as_type, one_line, parse_json
from components.rank_info import RankInfo

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
LAST_LINES = 20
"""Number of lines of a log that an error shows."""


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank."""

    rank: int
    time: float
    """Seconds since the epoch."""
    text: str
    """The message without its prefix ``rank N``."""
    final: bool
    """Whether the rank would fail again after a restart."""
    stalled: bool
    """Whether the watchdog has ended the rank."""
    out_of_memory: bool = False
    """Whether a train step ran out of memory."""


def report_failure(folder: Path, error: BaseException, *, stalled: bool = False) -> None:
    """Write the error and time of this rank's failure to ``logs/error_<rank>.json`` for the parent.

    The rank's first report is kept.
    """
    rank = RankInfo.read().rank
    path = failure_path(folder, rank)
    if path.exists():
        return
    said = isinstance(error, ConfigError | TrainingError)
    report = FailureReport(
        rank=rank,
        time=time.time(),
        text=f": {error}" if said else f" failed:\n{''.join(traceback.format_exception(error))}",
        final=isinstance(error, ConfigError | NonRetryableError),
        stalled=stalled,
        out_of_memory=isinstance(error, StepOutOfMemory),
    )
    write_atomic(path, json.dumps(asdict(report)))


def failure_path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"error_{rank}.json"


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Convert an OSError of a full or failing disk in the context into a TrainingError that names the file.

    ``path`` is named if the OSError has no file name.

    Raises:
        TrainingError: if there is such an error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise TrainingError(
            f"{error.filename or path}: could not be written: {error.strerror or error}; earlier checkpoints "
            "are untouched. Free some space, and run the command again with checkpoint.resume=auto."
        ) from error


@contextlib.contextmanager
def reporting_failures(folder: Path) -> Iterator[None]:
    """Write a failure report if the context raises an error, and raise the error again.

    The process that started the ranks finds the first failure in these reports.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # the failure may be that this disk is full
            report_failure(folder, error)
        raise


def read_failure_reports(folder: Path) -> list[FailureReport]:
    return [read_failure_report(path) for path in folder.glob("logs/error_*.json")]


def read_failure_report(path: Path) -> FailureReport:
    """Return the report in ``path``.

    If it cannot be read, return a report with the reason and an infinite time, later than all others.
    """
    try:
        return as_type(FailureReport, parse_json(path.read_text()))
    except (OSError, ValueError) as error:
        rank = int(path.stem.removeprefix("error_"))
        text = f" failed, and {path} cannot be read: {one_line(error)}"
        return FailureReport(rank, math.inf, text, final=False, stalled=False)


def clear_failure_reports(folder: Path) -> None:
    """Delete the failure reports of an earlier start of this run."""
    for path in folder.glob("logs/error_*.json"):
        path.unlink()


def root_cause(folder: Path, codes: Sequence[int | None]) -> TrainingError:
    """Return the failure that came first; broken connections of other ranks are only its consequences.

    It is a NonRetryableError if the rank would fail again after a restart, and a StepOutOfMemory if a step of
    the rank ran out of memory.

    Args:
        codes: exit code of each rank, negative for a signal. None means that the rank still runs.
    """
    found = read_failure_reports(folder)
    # A rank that was killed, or exited silently, has no report, and its failure is not a consequence.
    reported = {report.rank for report in found}
    silent = [r for r, code in enumerate(codes) if code not in (None, DONE) and r not in reported]
    if reported:  # NCCL aborts the peers of a failed rank
        silent = [r for r in silent if codes[r] != -signal.SIGABRT]
    if silent:
        rank = silent[0]
        return TrainingError(
            f"rank {rank} {describe_exit(codes[rank])}{read_last_lines(rank_log(folder, rank))}"
        )
    first = min(found, key=lambda report: report.time)
    if first.out_of_memory:
        return StepOutOfMemory(f"rank {first.rank}{first.text}")
    kind = NonRetryableError if first.final else TrainingError
    return kind(f"rank {first.rank}{first.text}")


def describe_exit(code: int | None) -> str:
    assert code is not None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def read_last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:] if path.exists() else []
    return "".join(f"\n  {line}" for line in lines)


def rank_log(folder: Path, rank: int) -> Path:
    path = folder / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(exist_ok=True)
    return path
