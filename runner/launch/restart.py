"""Restarts of a run in its own folder: after a failure (``run.max_restarts``), or with its SLURM job."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from components.checkpoint import is_run_folder, newest_valid, run_order
from components.contracts.errors import ConfigError, NonRetryableError, TrainingError
from components.preflight.checks import steps_done
from runner.launch.slurm_env import job_facts, max_requeues
from runner.launch.spawn import run_workers
from runner.logging_setup import log_to
from runner.records.run_dir import reopen_run_folder
from runner.records.run_record import METRICS, RunRecord, logged_results

log = logging.getLogger("runner")


def run_with_restarts(folder: Path, world_size: int, max_restarts: int) -> int:
    """Call ``run_workers``, and call it again after each failure, at most ``max_restarts`` more times.

    Return the number of the stop signal that came during the last call, or 0.

    Raises:
        TrainingError: if the last attempt fails, or any attempt raises a NonRetryableError.
    """
    for number in range(1, max_restarts + 1):
        try:
            return run_workers(folder, world_size)
        except NonRetryableError:
            raise
        except TrainingError as error:
            step = go_back(folder, number)
            with log_to(folder / "train.log", None):
                log.info("%s", error)
            first = str(error).splitlines()[0]
            print(f"restart {number} of {max_restarts}, from step {step}: {first}", file=sys.stderr)
    return run_workers(folder, world_size)


def go_back(folder: Path, restarts: int) -> int:
    """Prepare a restart from the newest valid checkpoint in ``folder``, and return its step.

    If there is none, the restart is from the checkpoint that the run resumed from, or else from step 0.
    Metrics after the step are removed. ``restarts``, the number of restarts so far, is written to the run
    record.
    """
    record = RunRecord.read(folder)
    point = newest_valid(folder / "checkpoints") or record.checkpoint
    step = steps_done(point)
    reopen_run_folder(folder, step)
    resumed_from = None if point is None else str(point)
    # A killed rank 0 had the results of earlier steps only in memory; without metrics.jsonl they are lost.
    results = logged_results(folder) if (folder / METRICS).exists() else record.results.up_to(step)
    replace(record, resumed_from=resumed_from, restarts=restarts, results=results).write(folder)
    return step


def begun_by_this_job(runs: Path, command: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """Return the run folder that this SLURM job used before its restart. None means that there is none.

    Raises:
        ConfigError: if RUNNER_MAX_REQUEUES, which is set for jobs that are one run, is not a number.
    """
    job, requeues = job_facts(environ), max_requeues(environ)
    if job is None or not job.restarts or not requeues:
        return None
    folders = [path.parent for path in runs.glob("*/run.json") if is_run_folder(path.parent)]
    for folder in sorted(folders, key=run_order, reverse=True):
        try:
            record = RunRecord.read(folder)
        except ConfigError:  # of another run, whose record is damaged or of a later version
            continue
        if record.slurm is not None and record.slurm.job == job.job and record.command == list(command):
            return folder
    return None
