"""Third part of a launch: the training on all ranks, and the end of the run."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from components.contracts.errors import DONE, INTERRUPTED, TrainingError
from components.contracts.json_types import Config
from components.rank_info import RankInfo
from runner.config.sources import ConfigSources
from runner.launch import rendezvous, slurm_env
from runner.launch.checks import RunPreparation, check_launch, inspect
from runner.launch.final_report import newest_checkpoint, print_stopped, print_summary
from runner.launch.out_of_memory import advising
from runner.launch.plan import print_forecast
from runner.launch.prepare import prepare
from runner.launch.prove import print_proof
from runner.launch.rehearse import print_rehearsal
from runner.launch.restart import run_with_restarts
from runner.records.failures import naming_file, report_failure, reporting_failures
from runner.records.run_record import RunRecord, Stopped, record_failure, recording_end
from runner.signals import SignalHandler, announce, handling
from runner.training.rank import late_failure, run_rank
from runner.training.stop import PRUNED
from runner.training.watchdog import end_process


def run(
    config: Config,
    where: ConfigSources,
    command: Sequence[str],
    began: float,
    on_folder: Callable[[Path], object] = str,
) -> float:
    """Run an experiment from start to end; return its final loss.

    It is the evaluation loss, or else the training loss, or NaN if neither was logged. If ``preflight.mode``
    is not ``check``, a forecast, a rehearsal or a proof is printed instead of a training, and the loss is
    NaN.

    Args:
        began: start of the command, in seconds since the Unix epoch; ``run.max_time`` counts from it.
        on_folder: called with the run folder, before the training.

    Raises:
        ConfigError: if the config is wrong, before any rank starts.
        TrainingError: if a rank failed.
        SystemExit: if a signal has stopped the run or came after its last step, with code DONE, or
            INTERRUPTED for an evaluation; a sweep then starts no other job. With code MISTAKE on the other
            ranks of torchrun or srun, after one could not prepare the run.
        KeyboardInterrupt: if a signal came twice, or before there was state to save.
    """
    launch, place = check_launch(config, where, command, began), RankInfo.read()
    for note in launch.notes if place.rank == 0 else ():
        launch.console.print(note, highlight=False)
    if launch.experiment.preflight.mode != "check":
        if launch.experiment.preflight.mode == "prove":
            return print_proof(launch)
        launch, found = inspect(launch)
        if launch.experiment.preflight.mode == "rehearse":
            return print_rehearsal(launch, found)
        return print_forecast(launch, found)
    if place.launched:
        with launch.resources:
            return run_launched(launch, place, on_folder)
    with launch.resources:
        folder, restarts = prepare(launch), launch.experiment.run.max_restarts
        on_folder(folder)
        with ending(folder, launch) as late_signal:
            if launch.world_size > 1 or restarts:
                late_signal.number = run_with_restarts(folder, launch.world_size, restarts)
            else:
                late_signal.number = run_rank(folder, partial(give_up, launch, folder))
            with handling(late_signal):
                return finish(launch, folder)


def run_launched(launch: RunPreparation, place: RankInfo, on_folder: Callable[[Path], object]) -> float:
    """Run one rank under torchrun or srun; return the final loss of the run.

    Rank 0 also prepares and concludes the run.
    """
    store = rendezvous.connect(os.environ)
    folder = rendezvous.agree_on_folder(store, os.environ, partial(prepare, launch))
    on_folder(folder)
    if place.rank != 0:
        rendezvous.prepare_nodes(store, os.environ, folder, launch.prepare_data)
        with reporting_failures(folder):
            run_rank(folder, partial(give_up, launch, folder))
        return RunRecord.read(folder).results.final_loss()
    with ending(folder, launch) as late_signal:
        rendezvous.prepare_nodes(store, os.environ, folder, launch.prepare_data)
        with reporting_failures(folder):
            late_signal.number = run_rank(folder, partial(give_up, launch, folder))
        with handling(late_signal):
            return finish(launch, folder)


def give_up(launch: RunPreparation, folder: Path, error: TrainingError) -> None:
    """Record that this rank makes no progress, and end the process; called on the watchdog's thread."""
    place = RankInfo.read()
    try:
        report_failure(folder, error, stalled=True)
        if place.rank == 0:
            record_failure(folder, error)
            if (job := launch.where.sweep_job) is not None:
                words = f"{type(error).__name__}: {error}"
                job.finish("failed", error=words, seconds=time.time() - launch.began)
    finally:
        end_process(error)


@contextmanager
def ending(folder: Path, launch: RunPreparation) -> Iterator[SignalHandler]:
    """Record how the run in the context ends; yield a signal handler to install during its final report.

    The handler does not let a first signal interrupt the report, so that the run is recorded as completed.
    Its number is also set if a signal came after the last step, such as during the export.

    Raises:
        SystemExit: with code DONE, when the context is left after such a signal: a sweep starts no other job.
    """
    late_signal = SignalHandler(announce, ignore_second=RankInfo.read().launched)
    with recording_end(folder), naming_file(folder), advising(launch, folder):
        yield late_signal
    if late_signal.number:
        raise SystemExit(DONE)


def finish(launch: RunPreparation, folder: Path) -> float:
    """Print the final report; return the final loss.

    Raises:
        TrainingError: if the last checkpoint or the export could not be written, or ``run.max_time`` ended an
            evaluation.
        SystemExit: if a signal has stopped the run, with code DONE, or that of ``end_evaluation``.
    """
    record = RunRecord.read(folder)
    saved, evaluates = newest_checkpoint(folder, record), launch.experiment.run.evaluate_only
    if record.stopped is None:
        with naming_file(folder / "export"):
            print_summary(launch.experiment, folder, record, saved)
    elif not evaluates:
        resumable = print_stopped(launch, record.stopped, saved)
        has_begun = record.stopped.step > 0
        if (resumable or not has_begun) and record.stopped.reason in slurm_env.REASONS:
            slurm_env.queue_again(os.environ)
    if (failure := late_failure(record, saved, evaluates=evaluates)) is not None:
        raise TrainingError(failure)
    if record.stopped is not None and evaluates:
        end_evaluation(record.stopped)
    if record.stopped is not None and record.stopped.reason not in ("run.max_time", PRUNED):
        raise SystemExit(DONE)
    return record.results.final_loss()


def end_evaluation(stopped: Stopped) -> NoReturn:
    """End a run that only evaluates and that a signal stopped before it had a result; it cannot be resumed.

    Raises:
        SystemExit: with code DONE if SLURM starts it again, else INTERRUPTED.
    """
    restarts = stopped.reason in slurm_env.REASONS and slurm_env.queue_again(os.environ)
    advice = "" if restarts else "; give the same command again"
    print(f"stopped before the evaluation was complete ({stopped.reason}){advice}")
    raise SystemExit(DONE if restarts else INTERRUPTED)
