"""One rank of a run: the steps from a prepared run folder to a trained, saved and exported model."""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from torch.distributed.tensor import DTensor

from components.contracts.engine import Engine
from components.contracts.errors import NonRetryableError, TrainingError
from components.contracts.json_types import Json
from components.engines.shared.parallel_dims import divisors
from components.loggers.console import terminal
from components.preflight.checks import steps_done
from components.preflight.estimates.flops import (
    peak_name,
)
from components.rank_info import RankInfo
from components.reference.precompute import precompute
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from runner.garbage_collection import collect_as_usual
from runner.logging_setup import log_to
from runner.records.failures import naming_file, reporting_failures
from runner.records.run_dir import read_run_config, write_config
from runner.records.run_record import PeakMemory, RunRecord
from runner.signals import SignalHandler, announce, handling
from runner.training.assembly import DTYPES, build_engine, build_loop, closing, engine_options, reporter
from runner.training.determinism import deterministic
from runner.training.loop import (
    TrainContext,
    TrialOutOfMemory,
    stop_record,
    take_trial_step,
    train,
    wants_trial_step,
)
from runner.training.metrics import MetricsReporter
from runner.training.state import TrainState
from runner.training.watchdog import Watchdog, end_process

log = logging.getLogger("runner")


def run_rank(folder: Path, give_up: Callable[[TrainingError], object] = end_process) -> int:
    """Train, evaluate, save and export; every rank of the run calls this function with the same folder.

    If the trial step of a run of one rank needs too much memory and ``run.micro_batch_size`` is auto, the
    run begins again with a smaller size. ``give_up`` ends the process if there is no progress for
    ``run.hang_timeout_s`` seconds. Return the number of the stop signal that the rank has received, or 0.

    Raises:
        TrainingError: if the run fails, for example because a file cannot be written. It is a
            NonRetryableError if ``check_weights`` or ``check_target`` raises it.
    """
    while True:
        try:
            return run_with_fixed_size(folder, give_up)
        except TrialOutOfMemory:
            if not lower_micro_batch_size(folder):
                raise
        gc.collect()  # the frames of the error are reference cycles that hold tensors


def lower_micro_batch_size(folder: Path) -> bool:
    """Halve the ``auto`` micro-batch size of the run in ``folder``, or take the next lower divisor.

    Return whether there is such a size. A run of several ranks keeps its size, because the others may still
    be in their trial step.
    """
    config, record = read_run_config(folder), RunRecord.read(folder)
    size = record.auto_micro_batch_size
    if size is None or size == 1 or record.world_size > 1:
        return False
    lower = max(each for each in divisors(config["run"]["global_batch_size"]) if each <= size // 2)
    config["run"]["micro_batch_size"] = lower
    write_config(folder, config)
    # The forecast is that of the first size.
    replace(record, auto_micro_batch_size=lower, peak_memory=PeakMemory()).write(folder)
    with log_to(folder / "train.log", Console(stderr=True)):
        log.warning(
            "trial step: out of memory with %d rows in a micro-batch (run.micro_batch_size=auto); "
            "the run begins again with %d",
            size,
            lower,
        )
    return True


def run_with_fixed_size(folder: Path, give_up: Callable[[TrainingError], object]) -> int:
    """Run this rank with the micro-batch size in the config of ``folder``; see ``run_rank``."""
    config, record = read_run_config(folder), RunRecord.read(folder)
    experiment = build_experiment(config, ConfigSources())
    # The only place where ranks differ: rank 0 prints, and writes the files of the run.
    place = RankInfo.read()
    main = place.rank == 0
    console = terminal(experiment.logger) if main else None
    run = experiment.run
    requested = SignalHandler(
        announce if main and "RUNNER_PARENT" not in os.environ else str, ignore_second=place.launched
    )
    with (
        naming_file(folder),
        log_to(folder / "train.log" if main else None, console),
        deterministic(run.deterministic),
        Watchdog(
            folder / "logs", place.rank, run.hang_timeout_s, give_up, on_request=place.launched
        ) as watchdog,
        ExitStack() as handlers,
    ):
        fill_reference(experiment, folder, record, watchdog)
        filled = record.reference and replace(record.reference, compute=False)  # for a restart
        beat = partial(watchdog.beat, "building the engine")
        beat()
        start: Json = {"progress": beat, "restores": record.checkpoint is not None}
        with closing(build_engine(experiment, record.device, **start), record.world_size) as engine:
            peak = {"mfu_peak": peak_name(engine.device, DTYPES[experiment.run.dtype])}
            record = replace(record, engine_facts=engine.describe() | peak, reference=filled)
            if main:
                record.write(folder)
            with (
                reporter(experiment, engine, folder, console, config, record) as report,
                # The failure is reported before the trackers are closed, which may take seconds: the parent
                # then waits for this rank.
                reporting_failures(folder) if place.world_size > 1 else nullcontext(),
                naming_file(folder),
            ):
                training = build_loop(experiment, engine, folder, record, report, requested, watchdog)
                handlers.callback(training.batches.close)
                handlers.enter_context(handling(requested))
                collect_as_usual()
                with recording_results(folder, report), training.checkpoints:
                    try:
                        record = with_trial_step(training, record)
                    except TrialOutOfMemory as error:
                        if requested.number:  # to stop: the run does not begin again
                            raise TrainingError(str(error)) from error
                        raise
                    if main:
                        record.write(folder)
                    train(training)
                finish(training, record, folder)
    return requested.number


def finish(training: TrainContext, record: RunRecord, folder: Path) -> None:
    """Record how training has ended, check and export a complete run, and call the hooks of the end."""
    run, report = training.run, training.reporter
    report.stopped = stop_record(training)
    main = report.loggers is not None
    record = replace(record, stopped=report.stopped, final_step=training.state.step)
    if main:
        report.failure = late_failure(record, training.checkpoints.current, evaluates=run.evaluate_only)
        replace(record, results=report.results).write(folder)
    if report.stopped is None and not run.evaluate_only:
        training.watchdog.beat("in the export")
        check_weights(training.engine, training.state)
        check_target(training.state, run.target_loss)
        if run.export:
            with naming_file(folder / "export"):
                training.engine.export(folder / "export")
    training.hooks.call("end", completed=report.stopped is None)
    if main:  # hooks may have logged metrics
        replace(record, results=report.results).write(folder)


def late_failure(record: RunRecord, saved: Path | None, *, evaluates: bool) -> str | None:
    """Return why a run has failed although no rank has, or None.

    ``run.max_time`` has ended an evaluation, or the last checkpoint is missing
    (``checkpoint.on_error=continue``). ``saved`` is the newest checkpoint. A run that ended before its first
    step has none.
    """
    if evaluates:
        is_cut = record.stopped is not None and record.stopped.reason == "run.max_time"
        return "run.max_time: the evaluation is not complete after this time; raise it." if is_cut else None
    if steps_done(saved) == record.final_step:
        return None
    if saved is None:
        return "no checkpoint could be written, as the log says (checkpoint.on_error=continue)."
    return (
        f"the checkpoint of step {record.final_step} could not be written, as the log says "
        f"(checkpoint.on_error=continue); the newest is {saved}."
    )


@contextmanager
def recording_results(folder: Path, report: MetricsReporter) -> Iterator[None]:
    """If the context raises an error, write the results so far to run.json; only rank 0 has any."""
    try:
        yield
    except BaseException:
        if report.loggers is not None:
            with suppress(OSError):  # the failure may be that this disk is full
                replace(RunRecord.read(folder), results=report.results).write(folder)
        raise


def with_trial_step(training: TrainContext, record: RunRecord) -> RunRecord:
    """Take the trial step, if the run has one, and return ``record`` with the measured peak memory."""
    num_stages = record.engine_facts.get("mesh", {}).get("dims", {}).get("pp", 1)
    peak = take_trial_step(training, num_stages) if wants_trial_step(training) else None
    return replace(record, peak_memory=replace(record.peak_memory, trial_step=peak))


def check_weights(engine: Engine, state: TrainState) -> None:
    """Raise NonRetryableError if all steps were skipped, or a weight is not finite.

    The metrics of such a run can look good, and its export would be mistaken for a trained model. A run that
    a hook ended before its first step is not refused.
    """
    if state.skipped == state.step > 0:
        raise NonRetryableError(
            f"all {state.step} steps were skipped, as the log says, and no weight was trained; lower "
            "optimizer.lr (with run.dtype=fp16 run.loss_scale.initial), or look at the samples that the log "
            "names."
        )
    tensors = engine.tensors(model_only=True).items()
    shards = ((name, t.to_local() if isinstance(t, DTensor) else t) for name, t in tensors)
    wrong = [name for name, shard in shards if not bool(shard.isfinite().all())]
    if engine.max_over_ranks(float(bool(wrong))):
        named = f", such as {wrong[0]}," if wrong else ""
        raise NonRetryableError(
            f"after step {state.step} some weights{named} are not finite; lower optimizer.lr, and resume "
            "from an earlier checkpoint."
        )


def check_target(state: TrainState, target_loss: float | None) -> None:
    """Raise NonRetryableError if the running mean of the loss is above ``run.target_loss``."""
    if target_loss is None:
        return
    if state.loss_mean is None:  # a hook ended the run before its first step
        raise NonRetryableError(f"no step was taken, so run.target_loss={target_loss} was not reached.")
    if state.loss_mean > target_loss:
        raise NonRetryableError(
            f"the training loss is {state.loss_mean:.4f} (running mean) after step {state.step}, above "
            f"run.target_loss={target_loss}; raise optimizer.lr or run.max_steps, or look for a mistake in "
            "the data or the loss."
        )


def fill_reference(experiment: Experiment, folder: Path, record: RunRecord, watchdog: Watchdog) -> None:
    """Compute the reference log-probabilities that the cache lacks; every rank calls this function."""
    if record.reference is None or not record.reference.compute:
        return
    source = experiment.reference
    # The reference of this engine is the model itself, without dropout.
    options = engine_options(experiment, record.device, reference="adapter_off")
    engine = experiment.parallelism.build(source.frozen_spec(), experiment.optimizer, options)
    with closing(engine, record.world_size):
        precompute(
            engine,
            experiment.data.restore(record.data),
            Path(record.reference.folder),
            scratch=folder / "reference",
            micro_batch_size=experiment.run.rows_per_microbatch,
            writes=RankInfo.read().rank == 0,
            merges=RankInfo.read().local_rank == 0,
            beat=partial(watchdog.beat, "computing the reference's log-probabilities"),
        )
