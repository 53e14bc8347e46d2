"""Sweeps: outcomes of jobs, a table of them at the end, and an exit code that reflects failures.

Hydra's sweepers and launchers raise the first failure and hide all others. Therefore a job records its
outcome and raises only if it cannot, and the process that started the sweep reads all outcomes.
"""

import json
import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import yaml
from rich.console import Console

from components.atomic_write import write_atomic
from components.contracts.errors import DONE, FAILED, MISTAKE, CompletedError, ConfigError
from components.contracts.json_types import Json
from components.contracts.status import JobStatus
from components.json_text import read_json
from components.rank_info import RankInfo
from runner.config.command_line import single_job_overrides
from runner.records.job_record import (
    JobRecord,
    SweepJob,
    are_comparable,
    best,
    read_job_record,
    read_job_records,
)
from runner.records.run_record import RunRecord, stop_reason
from runner.standard_streams import print_error
from runner.sweeps.table import print_table
from runner.training.stop import PRUNED


def run_point(point: SweepJob, task: Callable[[], float], explained: Callable[[Exception], int]) -> float:
    """Run one job and return its loss, or NaN if it has none.

    ``explained`` prints a failure for the user and returns its exit code.

    Raises:
        TrainingError: if its record cannot be written.
        KeyboardInterrupt, SystemExit: after a signal, so that no other job of this process begins.
    """
    point.mark_running()
    began, loss = time.monotonic(), math.nan

    def ended(status: JobStatus, error: str | None = None) -> None:
        known = None if math.isnan(loss) else loss
        point.finish(status, loss=known, error=error, seconds=time.monotonic() - began)

    try:
        loss = loss_of(point, task)
    except Exception as error:  # noqa: BLE001  every failure is printed and recorded
        mistake = explained(error) == MISTAKE
        words = str(error) if mistake else f"{type(error).__name__}: {error}"
        ended("invalid" if mistake else "failed", words)
    except (KeyboardInterrupt, SystemExit):
        record = completed_record(read_job_record(point.path).folder)
        loss = math.nan if record is None else record.results.final_loss()
        ended("interrupted" if record is None else "completed")
        raise
    else:
        ended(job_status(point))
    return loss


def loss_of(point: SweepJob, task: Callable[[], float]) -> float:
    """Return the loss of ``task``, or, if the same job has completed in an earlier sweep, its recorded loss.

    Raises:
        CompletedError: if the run to continue has completed with another config, or this process is a rank
            of srun, because the other ranks have then exited with the code of a refused job.
    """
    try:
        return task()
    except CompletedError as error:
        record = completed_record(error.folder)
        if record is None or not error.same_config or RankInfo.read().launched:
            raise
        print(f"this job has completed before: {error.folder}")
        point.mark_running(error.folder)
        return record.results.final_loss()


def completed_record(folder: str | Path | None) -> RunRecord | None:
    """Return the record of the run in ``folder``, or None if the run has not completed.

    A run that has completed may still end with SystemExit, if a signal arrives during its export or its
    final report.
    """
    try:
        record = None if folder is None else RunRecord.read(Path(folder))
    except (ConfigError, FileNotFoundError):
        return None
    return record if record is not None and record.ended == "completed" else None


def job_status(point: SweepJob) -> JobStatus:
    """Return the status of a job that did not raise.

    It is ``pruned`` if a pruner ended the run, ``interrupted`` if ``run.max_time`` did, else ``completed``.
    """
    reason = stop_reason(read_job_record(point.path).folder)
    return "completed" if reason is None else "pruned" if reason == PRUNED else "interrupted"


def create_sweep(folder: Path, overrides: Sequence[str], *, resumes: bool = False) -> None:
    """Write ``sweep.json`` with the command.

    A study that is resumed (``resumes``) keeps its file if it has jobs.

    Raises:
        ConfigError: if the folder has jobs of an earlier sweep, or if the file of a study that is resumed is
            damaged.
    """
    has_jobs = any((folder / "jobs").glob("*.json"))
    if has_jobs and not resumes:
        raise ConfigError(
            f"hydra.sweep.dir: {folder} has the jobs of an earlier sweep, which would be mixed with these; "
            "name another folder."
        )
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.json"
    # Without jobs, the file was written by a refused command or a dry run.
    if not has_jobs or not path.exists():
        write_json(path, {"began": now(), "command": sys.argv, "overrides": list(overrides)})
    read_json(path)


def finish_sweep(folder: Path, code: int) -> int:
    """Record and print the outcome of a sweep, and return its exit code, given the ``code`` of its command.

    If ``code`` is DONE, the result is FAILED if a job failed or did not record its end, or else MISTAKE if a
    job was refused. Otherwise it is ``code``. If the sweep itself was refused, or no job has begun,
    ``code`` is returned and nothing is written. If a file cannot be written, the result is FAILED.
    """
    records = read_job_records(folder)
    if not records or code == MISTAKE:  # a job never raises ConfigError, so the sweep itself was refused
        return code
    counts = Counter(record.status for record in records)
    if code == DONE and (counts["failed"] or counts["running"]):
        code = FAILED
    elif code == DONE and counts["invalid"]:
        code = MISTAKE
    winner = best(records)
    facts = {"ended": now(), "exit_code": code, "jobs": len(records), "counts": counts}
    facts["best"] = None if winner is None else winner.number
    print_table(records, Console())
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if winner is not None:
        print(f"best: job {winner.number}, loss {winner.loss:.4f}: {folder / 'best.yaml'}")
    elif not are_comparable(records):
        print("no best job: losses of different stages, or of other options of a stage, are not comparable")
    print(f"sweep folder: {folder}")
    path = folder / "sweep.json"
    try:
        write_json(path, {**read_json(path), **facts})
        if winner is not None:
            path = folder / "best.yaml"
            write_atomic(path, yaml.safe_dump(describe_best(winner), sort_keys=False, width=1000))
    except OSError as error:
        print_error(f"{path}: cannot be written: {error.strerror}.")
        return FAILED
    return code


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def write_json(path: Path, facts: object) -> None:
    write_atomic(path, json.dumps(facts, indent=2) + "\n")


def describe_best(winner: JobRecord) -> Json:
    words = single_job_overrides(winner.overrides, sys.argv)
    return {
        "job": winner.number,
        "loss": winner.loss,
        "folder": winner.folder,
        "overrides": words,
        "command": shlex.join(["python", "-m", "runner", *words]),
    }
