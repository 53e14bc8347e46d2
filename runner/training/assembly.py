"""The objects of one rank, built from its experiment: engine, loop, checkpoints, hooks and reporter."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from components.checkpoint import CheckpointManager, RunIdentity
from components.contracts.data import BatchShard, DataLoader
from components.contracts.device import DeviceKind
from components.contracts.engine import Engine, EngineOptions
from components.contracts.hook import Hook, HookRun
from components.contracts.json_types import Config
from components.loggers import CompositeLogger, RunInfo
from components.loggers.console import Terminal
from components.preflight.checks import steps_done
from components.preflight.estimates.flops import (
    matmul_sizes,
    passes_without_gradient,
    peak_flops,
    step_flops,
)
from components.rank_info import RankInfo
from runner.config.instantiate import Experiment
from runner.config.run_config import CheckpointConfig, seconds, watched_metric
from runner.records.run_record import RunRecord
from runner.signals import SignalHandler
from runner.training.hooks import Hooks
from runner.training.loop import (
    TrainContext,
    peak_memory,
)
from runner.training.metrics import MetricsReporter
from runner.training.own_hooks import BestMetric, SkipLimit, SyncReference
from runner.training.prefetch import Prefetched
from runner.training.profiler import Profiler
from runner.training.pruner import pruner_of
from runner.training.state import TrainState
from runner.training.stop import StopPolicy
from runner.training.watchdog import Watchdog

log = logging.getLogger("runner")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


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
    hooks = build_hooks(
        experiment, engine, folder, report, state, loader.num_steps, point, beat=watchdog.beat
    )
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
    *,
    beat: Callable[[str], object],
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
    return Hooks(observed, own, experiment.hook, beat)


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
