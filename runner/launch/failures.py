"""What ranks leave behind when they fail, and whose failure came first."""

import contextlib
import json
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from components.atomic_write import write_atomic
from components.contracts.errors import DONE, ConfigError, NonRetryableError, TrainingError
from components.contracts.json_types import Json
from components.rank_info import RankInfo


def report_failure(folder: Path, error: BaseException, *, stalled: bool = False) -> None:
    """Leaves what this rank failed of, and when, where the parent looks for it."""
    rank = RankInfo.read().rank
    said = isinstance(error, ConfigError | TrainingError)
    facts = {
        "rank": rank,
        "time": time.time(),
        "text": f": {error}" if said else f" failed:\n{''.join(traceback.format_exception(error))}",
        "final": isinstance(error, ConfigError | NonRetryableError),
        "stalled": stalled,
    }
    write_atomic(folder / "logs" / f"error_{rank}.json", json.dumps(facts))


@contextlib.contextmanager
def reporting_failures(folder: Path) -> Iterator[None]:
    """Around a rank that raises what it fails of: whoever started the ranks can tell whose failure it was."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk that is full may be the run's own
            report_failure(folder, error)
        raise


def read_failure_reports(folder: Path) -> list[Json]:
    return [json.loads(path.read_text()) for path in folder.glob("logs/error_*.json")]


def clear_failure_reports(folder: Path) -> None:
    """Of the run, or of the start of it, that this one continues."""
    for path in folder.glob("logs/error_*.json"):
        path.unlink()


def has_stalled(folder: Path) -> bool:
    """Whether a rank's watchdog has ended it."""
    return any(report["stalled"] for report in read_failure_reports(folder))


def root_cause(folder: Path, codes: Sequence[int | None]) -> TrainingError:
    """The failure that came first: a peer's broken connection is only its consequence."""
    found = read_failure_reports(folder)
    # A rank that was killed, or left without a word, has no report and cannot be anyone's consequence.
    reported = {report["rank"] for report in found}
    silent = [r for r, code in enumerate(codes) if code not in (None, DONE) and r not in reported]
    if reported:  # NCCL aborts the peers of a rank that failed
        silent = [r for r in silent if codes[r] != -signal.SIGABRT]
    if silent:
        rank = silent[0]
        return TrainingError(
            f"rank {rank} {describe_exit(codes[rank])}{read_last_lines(rank_log(folder, rank))}"
        )
    first = min(found, key=lambda report: report["time"])
    kind = NonRetryableError if first["final"] else TrainingError
    return kind(f"rank {first['rank']}{first['text']}")


def describe_exit(code: int | None) -> str:
    assert code is not None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def read_last_lines(path: Path, count: int = 20) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
    return "".join(f"\n  {line}" for line in lines)


def rank_log(folder: Path, rank: int) -> Path:
    path = folder / "logs" / f"rank_{rank}.log"
    path.parent.mkdir(exist_ok=True)
    return path
