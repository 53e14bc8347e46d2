"""Sweeps: the jobs, a table of their outcomes at the end, and an exit code that reflects failures.

Hydra's sweepers and launchers raise the first failure and hide the others. Therefore a job never raises
here: it writes its outcome, and the process that started the sweep reads them all.
"""

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import yaml
from rich.console import Console

from components.atomic_write import write_atomic
from components.contracts.errors import DONE, FAILED, MISTAKE
from components.contracts.json_types import Json
from runner.launch.run_record import RunRecord
from runner.sweeps.job_record import Outcome, Point, Status, best, read_outcome, read_outcomes
from runner.sweeps.table import show
from runner.training.stop import PRUNED


def run_point(point: Point, task: Callable[[], float], explained: Callable[[Exception], int]) -> float:
    """Run one job and record its outcome; return its loss, or NaN if there is none.

    ``explained`` prints a failure for the user and returns its exit code.

    Raises:
        KeyboardInterrupt, SystemExit: if a signal came, so that no other job of this process begins.
    """
    point.began()
    began, loss = time.monotonic(), math.nan

    def ended(status: Status, error: str | None = None) -> None:
        known = None if math.isnan(loss) else loss
        point.ended(status, loss=known, error=error, seconds=time.monotonic() - began)

    try:
        loss = task()
    except Exception as error:  # noqa: BLE001  the whole error is printed and recorded
        mistake = explained(error) == MISTAKE
        words = str(error) if mistake else f"{type(error).__name__}: {error}"
        ended("refused" if mistake else "failed", words)
    except (KeyboardInterrupt, SystemExit):
        ended("stopped")
        raise
    else:
        ended(how_it_ended(point))
    return loss


def how_it_ended(point: Point) -> Status:
    """Return the status of a job that did not raise; ``stopped`` means that ``run.max_time`` was over."""
    folder = read_outcome(point.path).folder
    if folder is None or not Path(folder, "run.json").is_file():  # a forecast has none
        return "done"
    stopped = RunRecord.read(Path(folder)).stopped
    if stopped is None:
        return "done"
    return "pruned" if stopped.reason == PRUNED else "stopped"


def begin(folder: Path, overrides: Sequence[str]) -> None:
    """Record the command and overrides of the sweep; a sweep that resumes keeps its first record."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.json"
    if not path.exists():
        write_json(path, {"began": now(), "command": sys.argv, "overrides": list(overrides)})


def conclude(folder: Path, code: int) -> int:
    """Print the table of a sweep whose command ends with ``code``; return the exit code to use instead.

    A refused job is listed, but does not make the sweep fail unless all jobs were refused.
    """
    outcomes = read_outcomes(folder)
    if not outcomes or code == MISTAKE:  # jobs never raise, so the sweep itself was refused
        return code
    counts = Counter(outcome.status for outcome in outcomes)
    if code == DONE and (counts["failed"] or counts["running"]):
        code = FAILED
    elif code == DONE and set(counts) == {"refused"}:
        code = MISTAKE
    winner = best(outcomes)
    facts = {"ended": now(), "exit_code": code, "jobs": len(outcomes), "counts": counts}
    facts["best"] = None if winner is None else winner.number
    path = folder / "sweep.json"
    write_json(path, json.loads(path.read_text()) | facts)
    show(outcomes, Console())
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if winner is not None:
        (folder / "best.yaml").write_text(yaml.safe_dump(about_best(winner), sort_keys=False, width=1000))
        print(f"best: job {winner.number}, loss {winner.loss:.4f}: {folder / 'best.yaml'}")
    print(f"sweep folder: {folder}")
    return code


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_json(path: Path, facts: object) -> None:
    write_atomic(path, json.dumps(facts, indent=2) + "\n")


def about_best(winner: Outcome) -> Json:
    words = alone(winner.overrides, sys.argv)
    return {
        "job": winner.number,
        "loss": winner.loss,
        "folder": winner.folder,
        "overrides": words,
        "command": shlex.join(["python", "-m", "runner", *words]),
    }


def sweeps(command: Sequence[str]) -> bool:
    """Return whether ``command`` is a sweep."""
    return any(word in ("-m", "--multirun") or word.startswith("sweep=") for word in command)


def alone(overrides: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the arguments that run one job of the sweep ``command`` by itself, without sweeping again."""
    places = [word for word in command if word.startswith(("--config-dir=", "-cd="))]
    pairs = pairwise(command)
    places += [f"--config-dir={after}" for word, after in pairs if word in ("--config-dir", "-cd")]
    swept = any(word.startswith("sweep=") for word in overrides)
    return [*places, *overrides, *(["hydra.mode=RUN"] if swept else [])]
