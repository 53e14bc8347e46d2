"""One rank's part: wires the components of a prepared run folder into the loop."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from components.checkpoint import CheckpointPolicy, RunIdentity, read_meta
from components.loggers import Loggers, Start
from components.loggers.console import Terminal, terminal
from components.metrics import matmul_sizes, peak_flops, train_flops
from components.precompute import precompute
from components.preflight import steps_done
from components.reference import resolve_reference
from runner.build import Experiment, build_experiment
from runner.determinism import deterministic
from runner.errors import TrainingError
from runner.folder import read_config, read_facts, write_facts
from runner.logs import log_to
from runner.loop import Training, stopped, train
from runner.prefetch import Prefetched
from runner.profiler import Profiler
from runner.protocols import BatchStats, Engine, EngineOptions
from runner.provenance import Provenance
from runner.pruning import pruner_of
from runner.reporter import Reporter
from runner.results import Results
from runner.state import TrainState
from runner.stop import Stop, StopRequest, announce, handling, seconds
from runner.watchdog import Watchdog, end_process

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run_rank(folder: Path, give_up: Callable[[TrainingError], object] = end_process) -> None:
    """Trains, evaluates, saves and exports; every rank of the run calls it with the same folder.

    ``give_up`` ends the process where nothing moves any more (``run.timeout``).
    """
    config, facts = read_config(folder), read_facts(folder)
    experiment = build_experiment(config, Provenance())
    # The one place where ranks differ: the first one speaks and writes the run's own files.
    main = os.environ.get("RANK", "0") == "0"
    console = terminal(experiment.logger) if main else None
    run, rank, alone = experiment.run, int(os.environ.get("RANK", "0")), "RANK" not in os.environ
    requested = StopRequest(
        announce if main and "RUNNER_PARENT" not in os.environ else str, patient=not alone
    )
    with (
        log_to(folder / "train.log" if main else None, console),
        deterministic(run.deterministic),
        Watchdog(folder / "logs", rank, run.timeout, give_up, on_request=not alone) as watchdog,
        ExitStack() as handlers,
    ):
        if facts["reference"] is not None and facts["reference"]["compute"]:
            with closing(build_reference(experiment, facts["device"]), facts["world_size"]) as engine:
                fill_reference(experiment, engine, folder, facts, main, watchdog)
        watchdog.beat("building the engine")
        with closing(build_engine(experiment, facts["device"]), facts["world_size"]) as engine:
            if main:
                write_facts(folder, **engine.describe())
            with reporter(experiment, engine, folder, console, config) as report:
                training = wire(experiment, engine, folder, facts, report, requested, watchdog)
                handlers.enter_context(handling(requested))
                with training.checkpoints:
                    train(training)
                report.stopped = stopped(training)
                if main:
                    write_facts(folder, stopped=report.stopped, results=vars(report.results))
                if run.export and report.stopped is None:
                    watchdog.beat("in the export")
                    engine.export(folder / "export")


@contextmanager
def closing(engine: Engine, world_size: int) -> Iterator[Engine]:
    """Closes ``engine`` when the context is left, by an error only where this is the only rank."""
    try:
        yield engine
    except BaseException:
        # With peers, closing would wait for what they never join; this process ends by itself.
        if world_size == 1:
            engine.close()
        raise
    engine.close()


def build_engine(experiment: Experiment, device: Any) -> Engine:
    """The engine that trains, with what it keeps for reference passes."""
    source = resolve_reference(experiment.stage, experiment.model, experiment.adapter)
    options = engine_options(
        experiment,
        device,
        adapter=experiment.adapter,
        reference=source.kept,
        reference_model=source.model if source.other else None,
    )
    return experiment.parallelism.build(experiment.model, experiment.optimizer, options)


def build_reference(experiment: Experiment, device: Any) -> Engine:
    """An engine that is only asked what the reference says."""
    source = resolve_reference(experiment.stage, experiment.model, experiment.adapter)
    # Its reference is the model itself, without dropout.
    options = engine_options(experiment, device, reference="adapter_off")
    return experiment.parallelism.build(source.to_ask(), experiment.optimizer, options)


def engine_options(experiment: Experiment, device: Any, **others: Any) -> EngineOptions:
    """Collect what ``run`` says of an engine; ``others`` are the fields that do not come from there."""
    run = experiment.run
    return EngineOptions(
        dtype=DTYPES[run.dtype],
        device=device,
        seed=run.seed,
        compiled=run.compile,
        kernels=run.kernels,
        count_zeros=run.count_zeros,
        timeout_s=run.timeout,
        **others,
    )


def fill_reference(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    facts: Mapping[str, Any],
    main: bool,
    watchdog: Watchdog,
) -> None:
    """Computes with ``engine`` what the cache lacks of the reference's log-probabilities."""
    precompute(
        engine,
        experiment.data.restore(facts["data"]),
        Path(facts["reference"]["folder"]),
        scratch=folder / "reference",
        micro_batch_size=experiment.run.micro_batch_size,
        writes=main,
        merges=os.environ.get("LOCAL_RANK", "0") == "0",
        beat=partial(watchdog.beat, "computing the reference's log-probabilities"),
    )


def wire(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    facts: Mapping[str, Any],
    report: Reporter,
    requested: StopRequest,
    watchdog: Watchdog,
) -> Training:
    """The loop's arguments, at the start of the run or where ``facts['resumed_from']`` left off."""
    run, share = experiment.run, {"data_rank": engine.data_rank, "data_size": engine.data_size}
    cache = None if facts["reference"] is None else Path(facts["reference"]["folder"])
    data = experiment.data.restore(facts["data"])
    rows = {"global_batch_size": run.global_batch_size, "micro_batch_size": run.micro_batch_size}
    train_data = Prefetched(
        data.train_loader(**rows, **share, reference=cache), pin=engine.device.type == "cuda"
    )
    state = TrainState()
    point = None if facts["resumed_from"] is None else Path(facts["resumed_from"])
    if point is not None:
        watchdog.beat(f"loading {point}")
        engine.load(point)
        state = TrainState(**read_meta(point).state)
    report.start(state, train_data.num_steps)
    deadline = math.inf if run.max_time is None else facts["began"] + seconds(run.max_time)
    return Training(
        engine=engine,
        loss=experiment.stage,
        train_data=train_data,
        eval_data=data.eval_loader(**rows, **share, reference=cache),
        lr=partial(experiment.scheduler.lr, peak=experiment.optimizer.lr, total_steps=train_data.num_steps),
        checkpoints=CheckpointPolicy(
            folder / "checkpoints",
            identity=RunIdentity(**facts["identity"]),
            keep_last=run.keep_last,
            keep_best=run.keep_best is not None,
            model_only=run.save_model_only,
            on_error=run.on_save_error,
            in_background=run.async_save,
            first_of_node=os.environ.get("LOCAL_RANK", "0") == "0",
            current=point,
        ),
        reporter=report,
        profiler=Profiler(run, folder / "profile", int(os.environ.get("RANK", "0")), engine.device),
        state=state,
        run=run,
        stop=Stop(
            engine.max_over_ranks,
            requested,
            deadline,
            save_s=save_seconds(engine),
            prune=pruner_of(facts["sweep"]) if os.environ.get("RANK", "0") == "0" else None,
        ),
        watchdog=watchdog,
    )


def save_seconds(engine: Engine) -> float:
    """What a first save may take: fp32 weights and two moments, to a disk that writes 200 MB a second."""
    return float(engine.describe()["trained_parameters"]) * 12 / 200e6


def reporter(
    experiment: Experiment,
    engine: Engine,
    folder: Path,
    console: Terminal | None,
    config: Mapping[str, Any],
) -> Reporter:
    """Speaks and logs where there is a ``console``; silent on every other rank."""
    sizes = matmul_sizes(
        experiment.model.build(experiment.model.config()), adapted=experiment.adapter is not None
    )
    source = resolve_reference(experiment.stage, experiment.model, experiment.adapter)

    def flops(stats: BatchStats) -> float:
        return train_flops(
            sizes,
            num_tokens=stats.num_computed_tokens,
            num_labels=stats.num_labels,
            sum_squared_seqlens=stats.sum_squared_seqlens,
            forward_only_passes=source.forward_only_passes,
        )

    if console is None:
        return Reporter(experiment.run.log_every, flops, None)
    facts = read_facts(folder)
    point = facts["resumed_from"]
    begun = Start(folder, config, facts, steps_done(None if point is None else Path(point)))
    return Reporter(
        experiment.run.log_every,
        flops,
        peak_flops(engine.device, DTYPES[experiment.run.dtype]) * facts["world_size"],
        Loggers(experiment.logger, begun),
        console.progress_bar(),
        Results(**facts.get("results") or {}),
    )
