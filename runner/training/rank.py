"""One rank of a run: build its engine, data and reporter from a prepared run folder, and train."""

import gc
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.tensor import DTensor

from components.checkpoint import CheckpointManager, RunIdentity
from components.contracts.data import BatchShard, DataLoader
from components.contracts.device import DeviceKind
from components.contracts.engine import Engine, EngineOptions
from components.contracts.errors import NonRetryableError, TrainingError
from components.contracts.hook import Hook, HookRun
from components.contracts.json_types import Config, Json
from components.engines.shared.parallel_dims import divisors
from components.loggers import CompositeLogger, RunInfo
from components.loggers.console import Terminal, terminal
from components.preflight.checks import steps_done
from components.preflight.estimates.flops import (
    matmul_sizes,
    passes_without_gradient,
    peak_flops,
    peak_name,
    step_flops,
)
from components.rank_info import RankInfo
from components.reference.precompute import precompute
from runner.config.instantiate import Experiment, build_experiment
from runner.config.run_config import CheckpointConfig, seconds, watched_metric
from runner.config.sources import ConfigSources
from runner.garbage_collection import collect_as_usual
from runner.logging_setup import log_to
from runner.records.failures import naming_file, reporting_failures
from runner.records.run_dir import read_run_config, write_config
from runner.records.run_record import PeakMemory, RunRecord
from runner.signals import SignalHandler, announce, handling
from runner.training.determinism import deterministic
from runner.training.hooks import Hooks
from runner.training.loop import (
    TrainContext,
    TrialOutOfMemory,
    peak_memory,
    stop_record,
    take_trial_step,
    train,
    wants_trial_step,
)
from runner.training.metrics import MetricsReporter
from runner.training.own_hooks import BestMetric, SkipLimit, SyncReference
from runner.training.prefetch import Prefetched
from runner.training.profiler import Profiler
from runner.training.pruner import pruner_of
from runner.training.state import TrainState
from runner.training.stop import StopPolicy
from runner.training.watchdog import Watchdog, end_process

log = logging.getLogger("runner")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


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
                report.stopped = stop_record(training)
                if main:
                    record = replace(record, stopped=report.stopped, final_step=training.state.step)
                    replace(record, results=report.results).write(folder)
                if report.stopped is None and not run.evaluate_only:
                    watchdog.beat("in the export")
                    check_weights(engine, training.state)
                    check_target(training.state, run.target_loss)
                    if run.export:
                        with naming_file(folder / "export"):
                            engine.export(folder / "export")
                watchdog.beat("in the hooks at the end of the run")
                training.hooks.call("end", completed=report.stopped is None)
                if main:  # hooks may have logged metrics
                    replace(record, results=report.results).write(folder)
    return requested.number


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


@contextmanager
def closing(engine: Engine, world_size: int) -> Iterator[Engine]:
    """Close ``engine`` when the context is left; after an error, only if this is the only rank."""
    try:
        yield engine
    except BaseException:
        # With peers, closing would wait for collectives that they never join; this process ends anyway.
        if world_size == 1:
            engine.close()
        raise
    engine.close()


def build_engine(experiment: Experiment, device: DeviceKind, **others: Any) -> Engine:
    """Build the engine that trains, with its reference model if there is one; ``others`` are its options."""
    options = replace(training_options(experiment, device), **others)
    return experiment.parallelism.build(experiment.model, experiment.optimizer, options)


def training_options(experiment: Experiment, device: DeviceKind) -> EngineOptions:
    """Build the options of the engine that trains."""
    source = experiment.reference
    return engine_options(
        experiment,
        device,
        adapter=experiment.adapter,
        reference=source.engine_mode,
        reference_model=source.model if source.is_separate_model else None,
        sync_reference=source.sync_every > 0,
    )


def engine_options(experiment: Experiment, device: DeviceKind, **others: Any) -> EngineOptions:
    """Build the engine options from ``experiment.run`` and ``others``, the remaining fields."""
    run = experiment.run
    return EngineOptions(
        dtype=DTYPES[run.dtype],
        device=device,
        seed=run.seed,
        compiled=run.compile,
        kernels=run.kernels,
        count_zeros=run.log_num_zeros,
        loss_scaling=run.loss_scale if run.dtype == "fp16" else None,
        timeout_s=run.hang_timeout_s,
        float8=run.dtype == "fp8",
        **others,
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


def build_loop(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    record: RunRecord,
    report: MetricsReporter,
    requested: SignalHandler,
    watchdog: Watchdog,
) -> TrainContext:
    """Build the arguments of ``train``, for a new run or from ``record.checkpoint``, on every rank."""
    run, place = experiment.run, RankInfo.read()
    cache = None if record.reference is None else Path(record.reference.folder)
    data = experiment.data.restore(record.data)
    shard = BatchShard(run.global_batch_size, run.rows_per_microbatch, engine.dp_rank, engine.dp_size)
    state = TrainState()
    point = record.checkpoint
    if point is not None:
        watchdog.beat(f"loading {point}")
        engine.load(point, model_only=run.evaluate_only)
        state = TrainState.read(point)
        if not run.evaluate_only:
            log.info("resumed from step %d of %s", state.step, point)
    if data.streamed:
        loader = open_stream(experiment, engine, shard, folder / "stream", record, state, watchdog)
    else:
        loader = data.train_loader(shard, cache)
    eval_data = data.eval_loaders(shard, cache)
    if run.evaluate_only:
        report.start_evaluation(sum(each.num_steps for each in eval_data.values()))
    else:
        report.start(state, loader.num_steps)
    deadline = math.inf if run.max_time is None else record.began + seconds(run.max_time)
    hooks = build_hooks(experiment, engine, folder, report, state, loader.num_steps, point)
    hooks.begin()
    return TrainContext(
        engine=engine,
        loss=experiment.stage,
        train_data=loader,
        batches=Prefetched(loader, engine.device),
        eval_data=eval_data,
        lr=partial(experiment.scheduler.lr, peak=experiment.optimizer.lr, total_steps=loader.num_steps),
        checkpoints=checkpoint_manager(experiment.checkpoint, folder, record, hooks),
        reporter=report,
        profiler=Profiler(experiment.profiler, folder / "profile", place.rank, engine.device),
        state=state,
        run=run,
        checkpoint=experiment.checkpoint,
        hooks=hooks,
        stop=StopPolicy(
            engine.max_over_ranks,
            requested,
            deadline,
            save_s=0.0 if run.evaluate_only else estimated_save_s(experiment, engine, place),
            prune=pruner_of(record.sweep) if place.rank == 0 and not run.evaluate_only else None,
        ),
        watchdog=watchdog,
    )


def estimated_save_s(experiment: Experiment, engine: Engine, place: RankInfo) -> float:
    """Return the seconds of a save of fp32 weights and two moments, if any, at 200 MB/s on every node."""
    nodes = place.world_size // place.local_world_size
    each = 4 if experiment.checkpoint.model_only else 12
    return float(engine.describe()["trained_parameters"]) * each / (200e6 * nodes)


def checkpoint_manager(
    options: CheckpointConfig, folder: Path, record: RunRecord, hooks: Hooks
) -> CheckpointManager:
    return CheckpointManager(
        folder / "checkpoints",
        identity=RunIdentity(**record.identity),
        keep_last=options.keep_last,
        keep_best=options.keep_best is not None,
        model_only=options.model_only,
        on_error=options.on_error,
        in_background=options.async_save,
        first_of_node=RankInfo.read().local_rank == 0,
        current=record.checkpoint,
        on_saved=partial(hooks.call, "after_save"),
    )


def build_hooks(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    report: MetricsReporter,
    state: TrainState,
    num_steps: int,
    resumed_from: Path | None,
) -> Hooks:
    """Build the hooks of the run, of which there are none with ``run.evaluate_only``."""
    run, stopping = experiment.run, experiment.early_stopping
    observed = replace(
        unlogged_run(experiment, folder, engine),
        state=state,
        num_steps=num_steps,
        resumed_from=resumed_from,
        log=partial(report.of_hook, state),
        log_table=partial(report.table_of_hook, state),
    )
    if run.evaluate_only:
        return Hooks(observed, {}, {})
    own: dict[str, Hook] = {"skip_limit": SkipLimit(state=state, limit=run.max_consecutive_skips)}
    own["sync_reference"] = reference_hook(experiment)
    # Whether there are evaluations was checked before the ranks started.
    watched = watched_metric(run, experiment.checkpoint, stopping, hooks_evaluate=True)
    if watched is not None:
        own["best_metric"] = BestMetric(
            state=state,
            watched=watched,
            saves=experiment.checkpoint.keep_best is not None,
            patience=None if stopping.metric is None else stopping.patience,
        )
    return Hooks(observed, own, experiment.hook)


def unlogged_run(experiment: Experiment, folder: Path, engine: Engine) -> HookRun:
    """Return a ``HookRun`` at step 0, through which hooks log nothing, as in a proof or a rehearsal."""
    return HookRun(
        folder=folder,
        is_main=RankInfo.read().rank == 0,
        engine=engine,
        model=experiment.model,
        adapter=experiment.adapter,
        dtype=DTYPES[experiment.run.dtype],
        seed=experiment.run.seed,
        state=TrainState(),
        num_steps=experiment.preflight.num_steps,
        resumed_from=None,
        log=lambda _: None,
        log_table=lambda *_: None,
    )


def reference_hook(experiment: Experiment) -> Hook:
    return SyncReference(source=experiment.reference)


def open_stream(
    experiment: Experiment,
    engine: Engine,
    shard: BatchShard,
    folder: Path,
    record: RunRecord,
    state: TrainState,
    watchdog: Watchdog,
) -> DataLoader:
    """Open the stream of training data at the position of ``state``; every rank calls this function."""
    loader = experiment.data.open_stream(
        record.data,
        shard,
        experiment.stage.kind,
        experiment.model.load_tokenizer(),
        folder,
        step=state.step,
        position=state.stream_position,
        main=RankInfo.read().rank == 0,
        beat=partial(watchdog.beat, "skipping the used records of the stream"),
    )
    engine.max_over_ranks(0.0)  # no rank reads the folder before rank 0 has emptied it
    return loader


def reporter(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    console: Terminal | None,
    config: Config,
    record: RunRecord,
) -> MetricsReporter:
    """Build the reporter, which prints and logs only with a ``console``; only rank 0 has one."""
    sizes = matmul_sizes(experiment.model.meta_model, adapted=experiment.adapter is not None)
    source = experiment.reference
    reference = None if source.engine_mode == "none" else matmul_sizes(source.model.meta_model)
    passes = passes_without_gradient(experiment.stage, sizes, reference)
    flops = partial(step_flops, sizes, forward_only=passes)
    report = MetricsReporter(experiment.run.log_every, flops, None, partial(peak_memory, engine))
    if console is not None:
        begun = RunInfo(folder, config, record.to_json(), steps_done(record.checkpoint))
        report.peak_flops = peak_flops(engine.device, DTYPES[experiment.run.dtype]) * record.world_size
        report.loggers = CompositeLogger(experiment.logger, begun)
        report.progress, report.results = console.progress_bar(), record.results
    return report
