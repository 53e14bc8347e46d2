"""First part of a launch: all checks of a run, before its folder is created or a rank is started."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from components.checkpoint import (
    Resume,
    RunIdentity,
    is_run_folder,
    newest_of_runs,
    newest_valid,
    read_meta,
    verify_checkpoint,
)
from components.contracts.configs import AdapterConfig, ModelConfig, Prepared
from components.contracts.device import DeviceKind
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.loggers import terminal
from components.preflight import checks
from components.preflight.device_checks import check_float8, check_ranks, resolve_device
from components.preflight.engine_layouts import known_parts
from components.preflight.estimates.device_specs import find_device
from components.preflight.eval_metrics import check_watched_metric, check_watched_set
from components.preflight.evaluation_checks import (
    check_early_stop,
    check_evaluate_only,
    check_evaluated_checkpoint,
    check_evaluated_reference,
    check_evaluating_hooks,
    check_evaluation,
    may_request_evaluations,
    warn_of_held_out,
    warn_of_late_evaluations,
)
from components.preflight.search.candidate import Candidate
from components.rank_info import RankInfo, check_place
from components.reference.source import ReferenceSource, about_reference
from runner.config.instantiate import Experiment, build_experiment
from runner.config.run_config import watched_metric
from runner.config.sources import ConfigSources
from runner.launch.restart import begun_by_this_job
from runner.launch.slurm_env import check_forwarding
from runner.launch.unread_options import check_unread_options, may_evaluate
from runner.logging_setup import log_to
from runner.records.job_record import SweepJob
from runner.records.run_dir import create_run_folder, read_run_config, write_config
from runner.records.run_record import RunRecord, has_completed
from runner.training.assembly import DTYPES, engine_options
from runner.training.state import TrainState

ASSUMED_GPU = "H100"
LARGE_RATE = 1e-3
"""Lowest learning rate that is reported as too large for most pretrained models."""
READ_BY_STEPS = (
    *("checkpoint.save_every", "checkpoint.save_every_epochs", "profiler.enabled", "run.eval_on_start"),
    *("run.loss_spike_factor", "run.max_consecutive_skips", "run.target_loss", "run.trial_step"),
)
"""Options that have no effect without train steps."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that has passed all checks that need no ranks, except the check that it fits into memory."""

    data: Prepared
    identity: RunIdentity
    resume: Path | None
    """The checkpoint to resume from. None means a new run."""
    previous_run_dir: Path | None
    """The run folder that this SLURM job used before SLURM requeued it. None means that there is none."""
    candidate: Candidate | None
    """Inputs of the forecast. None means that no forecast is made; see ``RunPreparation.candidate``."""


@dataclass(frozen=True)
class RunPreparation:
    """A composed experiment, its device and its number of ranks."""

    config: Config
    where: ConfigSources
    command: Sequence[str]
    began: float
    """Start of the command, in seconds since the Unix epoch; ``run.max_time`` counts from it."""
    experiment: Experiment
    reference: ReferenceSource
    device: DeviceKind
    world_size: int
    local_ranks: int
    console: Console
    notes: tuple[str, ...] = ()
    """Sentences to print about assumed values, and about options that may be mistakes."""
    resources: ExitStack = field(default_factory=ExitStack)
    """Contexts to leave when the run has ended: the lock of its folder."""

    @property
    def evaluation_data(self) -> str:
        """The option that names evaluation data."""
        return "data.eval_dataset" if "eval_dataset" in self.config["data"] else "data.eval"

    def inspect(self) -> PreparedRun:
        """Run all checks that need no ranks, and prepare the data.

        Raises:
            ConfigError: if a check fails.
        """
        experiment, run = self.experiment, self.experiment.run
        model = self.check_components()
        for name, hook in experiment.hook.items():
            hook.check_model(name, experiment.model)
        with log_to(None, self.console):
            if experiment.preflight.mode == "check" and experiment.checkpoint.init_from is None:
                checks.warn_of_random_weights(experiment.model, experiment.adapter)
            data = self.prepare_data()
            if not may_evaluate(experiment) and (fraction := getattr(experiment.data, "eval_fraction", 0.0)):
                warn_of_held_out(fraction)
            if not run.evaluate_only:
                checks.warn_of_constant_reference(self.reference.sync_every, data.num_steps)
                requests = may_request_evaluations(experiment.hook)
                if not (requests or run.evaluates_within(data.num_steps)):
                    warn_of_late_evaluations(watched_metrics(experiment), data.num_steps)
        if data.streamed:
            save_every_epochs = experiment.checkpoint.save_every_epochs
            checks.check_stream(run.eval_every_epochs, save_every_epochs, self.reference.choice)
        if not run.evaluate_only:
            experiment.scheduler.check(peak=experiment.optimizer.lr, total_steps=data.num_steps)
        identity = self.identity(model, data)
        own = begun_by_this_job(Path(run.output_dir, run.name), self.command, os.environ)
        resume = self.resume_point(own, identity, data)
        return PreparedRun(data, identity, resume, own, self.candidate(model, data))

    def check_components(self) -> nn.Module:
        """Check each component and its fit with the layout; return the model, on the meta device.

        Raises:
            ConfigError: if a check fails.
        """
        run, experiment = self.experiment.run, self.experiment
        if experiment.preflight.mode != "plan":  # "plan" searches for another layout
            dp_size = experiment.parallelism.dp_size(self.world_size)
            checks.check_batch(run.global_batch_size, run.rows_per_microbatch, dp_size)
        model = check_parts(experiment)
        self.check_layout(model, experiment.adapter)
        if (init_from := experiment.checkpoint.init_from) is not None and experiment.checkpoint.verify:
            verify_checkpoint(Path(init_from), checksums=True, option="checkpoint.init_from")
        if experiment.preflight.mode == "check":
            experiment.model.weights(run.seed)  # only opened: a missing file is found before a rank starts
        if self.reference.is_separate_model:
            with about_reference():
                self.check_layout(self.reference.model.meta_model, trains=False)
            self.reference.check(model, experiment.model.load_tokenizer())
        return model

    def check_layout(
        self, model: nn.Module, adapter: AdapterConfig | None = None, *, trains: bool = True
    ) -> None:
        """Raise ConfigError if the engine cannot run ``model`` (on the meta device) in this layout.

        Unless it ``trains`` the model, groups of weights and recomputed layers need not be in it.
        """
        experiment = self.experiment
        if experiment.preflight.mode == "plan":
            return
        layout, optimizer = experiment.parallelism, experiment.optimizer
        if not trains and (parts := known_parts(layout, optimizer, None)) is not None:
            layout = replace(parts[0], recompute_num_layers=None, recompute_modules=None)
            optimizer = replace(parts[1], groups=())
        options = engine_options(experiment, self.device, adapter=adapter)
        layout.check(model, optimizer, options, world_size=self.world_size)

    def identity(self, model: nn.Module, data: Prepared) -> RunIdentity:
        experiment, reference, trained = self.experiment, self.reference.describe_init, None
        if experiment.adapter is not None:
            trained = experiment.adapter.shape_hash(model)
        elif experiment.model.freeze or experiment.model.train_only:
            trained = experiment.model.trained_shape_hash(model)
        # A forecast of a new run needs no weights, which would be downloaded for these hashes.
        begins = experiment.preflight.mode == "check" or experiment.checkpoint.resume != "never"
        own_seed = self.seed_suffix(experiment.model)
        return RunIdentity(
            model=experiment.model.shape_hash(model),
            data=data.identity,
            optimizer=experiment.optimizer.kind,
            reference=reference and reference + self.seed_suffix(self.reference.model),
            seed=experiment.run.seed,
            global_batch_size=experiment.run.global_batch_size,
            trained=trained,
            base=experiment.model.content_hash() + own_seed if trained and begins else None,
            reference_content=self.reference.content_hash(experiment.run.seed) if begins else None,
        )

    def seed_suffix(self, model: ModelConfig) -> str:
        """Return the seed as a suffix for the run's identity if the weights of ``model`` are random, else "".

        Frozen random weights are not in a checkpoint. A resumed run generates them again, so its seed must be
        the same.
        """
        return f", run.seed={self.experiment.run.seed}" if model.is_random_init else ""

    def resume_point(self, own: Path | None, identity: RunIdentity, data: Prepared) -> Path | None:
        """Return the checkpoint to resume from, after checking it and the remaining steps.

        None means a new run. ``own`` is the run folder that this SLURM job used before it was requeued.

        Raises:
            ConfigError: if the checkpoint cannot be resumed from, no steps remain, or an option of
                evaluations or of the profiler does not suit the data or the steps.
        """
        experiment, run, checkpoint = self.experiment, self.experiment.run, self.experiment.checkpoint
        with log_to(None, self.console):
            saved = None if own is None else newest_valid(own / "checkpoints")
            asked = Resume(
                str(saved or checkpoint.resume),
                verify=checkpoint.verify,
                force=checkpoint.allow_mismatch,
                evaluates=run.evaluate_only,
            )
            may_continue = partial(is_own_run, job=self.where.sweep_job)
            resume = asked.resolve(Path(run.output_dir), run.name, identity, may_continue)
        if resume is not None:
            TrainState.read(resume)
            if self.reference.sync_every and read_meta(resume).model_only:
                raise ConfigError(
                    f"checkpoint.resume: {resume} holds only weights, and not those of the reference model, "
                    "which stage.sync_reference_every changed; evaluate another checkpoint."
                )
        # The same run was checked at its first start.
        if saved is not None:
            return resume
        if checkpoint.resume != "auto":  # "auto" uses init_from if there is no checkpoint to resume from
            checks.check_start(self.config["checkpoint"]["init_from"], resume)
        if run.evaluate_only:
            check_evaluate_only(bool(data.eval), experiment.hook, self.evaluation_data)
            check_evaluated_checkpoint(checkpoint.resume, resume, Path(run.output_dir, run.name))
            return resume
        for key, metric in watched_metrics(experiment).items():
            check_watched_set(metric, experiment.stage, data.eval, key)
        for name in ("eval_every", "eval_every_epochs", "eval_on_start"):
            check_evaluation(name, getattr(run, name), bool(data.eval), self.evaluation_data)
        due = run.evaluates_after_steps or may_request_evaluations(experiment.hook)
        check_evaluating_hooks(experiment.hook, evaluates=bool(data.eval) and due)
        left, profiler = data.num_steps - checks.steps_done(resume), experiment.profiler
        if profiler.enabled:
            checks.check_profiled_ranks(profiler.ranks, self.world_size)
        unfinished = resume is not None and not has_completed(resume)
        if unfinished and left == 0:  # killed or stopped before its last evaluation, its export or its report
            return resume
        checks.check_length(data.num_steps, resume)
        if unfinished:
            return resume
        stopping = experiment.early_stopping
        watched = watched_metric(run, checkpoint, stopping, hooks_evaluate=True)
        if watched is not None and stopping.metric is not None:
            check_early_stop(watched.name, watched.mode, stopping.patience, resume)
        if profiler.enabled:
            checks.check_profiled_steps(profiler.steps[1], left)
        return resume

    def prepare_data(self) -> Prepared:
        """Prepare the data, with tokens and batch plans in the cache on this machine's filesystem.

        Raises:
            ConfigError: if the data is wrong, or does not suit the model, the tokenizer or the loss.
        """
        run, experiment = self.experiment.run, self.experiment
        stage, data = experiment.stage, experiment.data
        checks.check_normalisation(getattr(stage, "normalize", None), data.resolve_packing(stage.kind))
        tokenizer = experiment.model.load_tokenizer()
        checks.check_model_fits_data(
            experiment.model.config(), tokenizer, data.max_length, run.final_sample_tokens
        )
        return data.prepare(
            stage.kind,
            tokenizer,
            seed=run.seed,
            global_batch_size=run.global_batch_size,
            max_steps=run.max_steps,
            epochs=run.epochs,
        )

    def candidate(self, model: nn.Module, data: Prepared) -> Candidate | None:
        """Return the inputs of the forecast; ``model`` is on the meta device.

        None means that no forecast is made, because the class of the layout, the optimizer or the adapter is
        not one of this program.
        """
        experiment, run, ahead = self.experiment, self.experiment.run, self.experiment.preflight
        parts = known_parts(experiment.parallelism, experiment.optimizer, experiment.adapter)
        if parts is None:
            return None
        layout, optimizer, adapter = parts
        reference, dtype, ranks = self.reference, DTYPES[run.dtype], ahead.devices or self.local_ranks
        name, memory = ahead.device_name, ahead.device_memory
        device = find_device(self.device, name, memory, local_ranks=ranks, dtype=dtype)
        if self.local_ranks < self.world_size:  # a launcher has chosen how many ranks a machine has
            device = replace(device, per_node=self.local_ranks)
        return Candidate(
            layout=layout,
            world_size=self.world_size,
            model=model,
            adapter=adapter,
            optimizer=optimizer,
            loss=experiment.stage,
            reference=reference.engine_mode,
            reference_model=reference.model.meta_model if reference.is_separate_model else None,
            data=data,
            micro_batch_size=run.rows_per_microbatch,
            dtype=dtype,
            device=device,
            compiled=run.compile,
            kernels=run.kernels,
            float8=run.dtype == "fp8",
            weight_copies=sum(hook.weight_copies for hook in experiment.hook.values()),
            max_length=experiment.data.max_length,
            shares_prompts=experiment.data.share_prompt,
            keeps_microbatch_size=experiment.model.moe.depends_on_microbatches,
            may_add_adapter=not (experiment.model.moe.bias_update_rate or experiment.model.add_tokens),
            layout_keys=frozenset(map(str, self.config["parallelism"])),
        )

    def preflight_folder(self) -> Path:
        """Create the folder of a forecast, a rehearsal or a proof, with the config in it."""
        folder = create_run_folder(self.experiment.run.output_dir, "preflight")
        if self.where.sweep_job is not None:
            self.where.sweep_job.mark_running(folder)
        write_config(folder, self.config)
        return folder

    def with_run(self, **keys: Any) -> Self:
        """Return a copy with other values of these keys of ``run``."""
        experiment = replace(self.experiment, run=replace(self.experiment.run, **keys))
        config = {**self.config, "run": {**self.config["run"], **keys}}
        return replace(self, experiment=experiment, config=config)


def without_training(config: Config, where: ConfigSources) -> Config:
    """Return the config of an evaluation, without the watched metrics of an experiment file.

    Raises:
        ConfigError: if the command line sets a metric to watch, or an option that only steps read.
    """
    found = dict(config)
    for group, key in (("checkpoint", "keep_best"), ("early_stopping", "metric")):
        found[group] = {**config[group], key: None}
    for name in ("checkpoint.keep_best", "early_stopping.metric", *READ_BY_STEPS):
        group, key = name.split(".")
        if where.typed(name) and config[group][key] not in (None, False):
            raise ConfigError(f"{name}: run.evaluate_only takes no step; leave it out.")
    return found


def check_launch(
    config: Config, where: ConfigSources, command: Sequence[str], began: float | None = None
) -> RunPreparation:
    """Build the experiment of ``config`` and check the options that belong to no component.

    Raises:
        ConfigError: if the config or one of these options is wrong.
    """
    experiment, config = checked_experiment(config, where)
    if (start := recorded_start(experiment, where, command)) is not None:
        config = {**config, "checkpoint": {**config["checkpoint"], "init_from": start}}
        experiment = build_experiment(config, where)
    if experiment.preflight.mode != "check":
        experiment = replace(experiment, model=experiment.model.with_any_tokenizer())
    experiment, notes = with_assumed_gpu(experiment)
    run, ahead, checkpoint = experiment.run, experiment.preflight, experiment.checkpoint
    if checkpoint.init_from is not None:  # so that ranks read the checkpoint that is the newest now
        config = {**config, "checkpoint": {**config["checkpoint"], "init_from": checkpoint.init_from}}
    reference = experiment.reference
    if run.evaluate_only and checkpoint.resume == "never":
        is_other = reference.is_separate_model or experiment.adapter is not None  # without the adapter
        check_evaluated_reference(reference.choice, other=is_other)
    check_place(os.environ)
    check_forwarding(os.environ)
    place = RankInfo.read()
    name, evaluates, joined = ahead.device_name, run.evaluate_only, place.launched
    checks.check_modes(ahead.mode, ahead.devices, name, run.device, joined=joined, evaluates=evaluates)
    checks.check_forecast(ahead.mode, experiment.parallelism, run.dtype)
    device = "cpu" if ahead.mode == "prove" else resolve_device(run.device, name)
    gpus = 0 if device == "cpu" else torch.accelerator.device_count()
    world_size = experiment.parallelism.world_size(os.environ, gpus)
    local_ranks = place.local_world_size if place.launched else world_size
    checks.check_rehearsed_rank(ahead.rank, world_size)
    if run.dtype == "fp8":
        check_float8(device, name, experiment.parallelism)
    if ahead.mode == "check":
        check_ranks(world_size, device, local_ranks)
    checks.check_restarts(run.max_restarts, place.launched)
    launch = RunPreparation(
        config=config,
        where=where,
        command=command,
        began=time.time() if began is None else began,
        experiment=experiment,
        reference=reference,
        device=device,
        world_size=world_size,
        local_ranks=local_ranks,
        console=terminal(experiment.logger),
        notes=(*notes, *large_rate(experiment, where)),
    )
    if ahead.mode in ("only", "rehearse") and not where.given("run.global_batch_size"):
        return with_assumed_batch(launch)
    return launch


def recorded_start(experiment: Experiment, where: ConfigSources, command: Sequence[str]) -> str | None:
    """Return the ``checkpoint.init_from`` with which the run that this command continues has begun.

    The one that is given may be a folder of runs, of which another one is the newest now. None means that no
    run is continued, that none is given, or that the recorded one does not exist any more.
    """
    run, checkpoint = experiment.run, experiment.checkpoint
    if checkpoint.init_from is None:
        return None
    runs = Path(run.output_dir, run.name)
    folder = begun_by_this_job(runs, command, os.environ)
    if folder is None and checkpoint.resume == "auto":
        point = newest_of_runs(runs, partial(is_own_run, job=where.sweep_job))
        folder = None if point is None else point.parent.parent
    if folder is None or not (folder / "config.yaml").exists():
        return None
    start: str | None = read_run_config(folder)["checkpoint"].get("init_from")
    return start if start is not None and Path(start).is_dir() else None


def is_own_run(folder: Path, job: SweepJob | None) -> bool:
    """Return whether ``folder`` is a run folder, not a copy, and its run was given what the sweep varies.

    Jobs of a sweep may share ``run.name``. None for ``job`` means that there is no sweep.
    """
    if job is None or not is_run_folder(folder):
        return is_run_folder(folder)
    try:
        place = RunRecord.read(folder).sweep
    except (ConfigError, OSError):  # damaged, of a later version, or absent as only checkpoints were copied
        return False
    return set(job.swept) == set(place.swept if place is not None else ())


def check_parts(experiment: Experiment) -> PreTrainedModel:
    """Check each component and the fit of components, without regard to this machine's devices.

    Returns:
        The model, on the meta device.

    Raises:
        ConfigError: if a check fails.
    """
    model = experiment.model
    checks.check_shared_prompt(experiment.data.share_prompt, experiment.parallelism)
    dropout = getattr(experiment.adapter, "dropout", 0.0)
    checks.check_random_numbers(model.neftune_alpha, dropout, experiment.data.share_prompt)
    checks.check_mtp_stage(model.mtp.num_layers, experiment.stage.kind)
    for logger in experiment.logger.values():
        logger.check()
    checks.check_generating_hooks(model.scalar_head, experiment.hook)
    for name, hook in experiment.hook.items():
        hook.check(name)
    meta_model = model.meta_model
    checks.check_adapter(experiment.adapter, meta_model, model.moe.bias_update_rate, bool(model.add_tokens))
    checks.check_head_dim(experiment.optimizer, meta_model, adapted=experiment.adapter is not None)
    return meta_model


def checked_experiment(config: Config, where: ConfigSources) -> tuple[Experiment, Config]:
    """Build the experiment of ``config`` and check options that have an effect only with others.

    Returns:
        The experiment and its config. Those of an evaluation have no hooks and watch no metrics.

    Raises:
        ConfigError: if the config or one of these options is wrong.
    """
    experiment = build_experiment(config, where)
    if experiment.run.evaluate_only:
        config = without_training(config, where)
        experiment = build_experiment(config, where)
    check_unread_options(experiment, config, where)
    for key, metric in watched_metrics(experiment).items():
        check_watched_metric(metric, experiment.stage, key)
    hooks_evaluate = may_request_evaluations(experiment.hook)
    watched_metric(
        experiment.run, experiment.checkpoint, experiment.early_stopping, hooks_evaluate=hooks_evaluate
    )
    return experiment, config


def inspect(launch: RunPreparation) -> tuple[RunPreparation, PreparedRun]:
    """Run all checks that need no ranks, prepare the data, and choose an ``auto`` micro-batch size.

    Raises:
        ConfigError: if a check fails, or if the size is ``auto`` although there is no forecast, or although
            an auxiliary loss depends on the size.
    """
    found, run = launch.inspect(), launch.experiment.run
    if run.micro_batch_size != "auto":
        return launch, found
    if launch.experiment.model.moe.depends_on_microbatches:
        raise ConfigError(
            "run.micro_batch_size: is auto, but the value of this model.moe.aux_loss depends on it; give a "
            "number, or use model.moe.aux_loss=sequence."
        )
    if found.candidate is None:
        raise ConfigError(
            "run.micro_batch_size: is auto, but the memory of a layout, optimizer or adapter of your own is "
            "not known; give a number."
        )
    case = found.candidate.with_largest_microbatch()
    return launch.with_run(micro_batch_size=case.micro_batch_size), replace(found, candidate=case)


def watched_metrics(experiment: Experiment) -> dict[str, str]:
    """Return the metrics that checkpoints and early stopping watch, by the option that names each."""
    named = {
        "checkpoint.keep_best": experiment.checkpoint.keep_best,
        "early_stopping.metric": experiment.early_stopping.metric,
    }
    return {key: metric for key, metric in named.items() if metric is not None}


def with_assumed_gpu(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """Return ``experiment``, with an assumed GPU for a rehearsal without one, and sentences to print."""
    ahead = experiment.preflight
    if ahead.mode != "rehearse" or ahead.device_name is not None or torch.cuda.is_available():
        return experiment, ()
    note = f"preflight.device_name is not given, and {ASSUMED_GPU} is assumed"
    return replace(experiment, preflight=replace(ahead, device_name=ASSUMED_GPU)), (note,)


def large_rate(experiment: Experiment, where: ConfigSources) -> tuple[str, ...]:
    """Return the sentence to print if pretrained weights are trained at a default rate that is too large."""
    trains, rate = not experiment.run.evaluate_only, experiment.optimizer.lr
    if not trains or experiment.model.is_random_init or where.chosen("optimizer.lr") or rate < LARGE_RATE:
        return ()
    return (f"optimizer.lr={rate:g} suits new models; to fine-tune, 1e-5 (adapter: 1e-4) is usual",)


def with_assumed_batch(launch: RunPreparation) -> RunPreparation:
    """Round the default global batch size up to a multiple of what the layout processes at once.

    This is for forecasts and rehearsals of a large layout. A run needs an explicit value.
    """
    run = launch.experiment.run
    unit = run.rows_per_microbatch * launch.experiment.parallelism.dp_size(launch.world_size)
    assumed = checks.next_batch(run.global_batch_size, unit)
    if assumed == run.global_batch_size:
        return launch
    note = f"run.global_batch_size is not given, and {assumed} is assumed"
    return replace(launch.with_run(global_batch_size=assumed), notes=(*launch.notes, note))
