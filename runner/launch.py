"""From a composed config to a finished run: check, prepare in this process, then start the ranks."""

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from components import preflight
from components.checkpoint import Resume, RunIdentity, check_whole, newest_undamaged
from components.loggers import terminal
from components.reference import about_reference, resolve_reference
from runner import join, slurm
from runner.blame import forget_reports, report, reporting
from runner.build import build_experiment
from runner.errors import TrainingError
from runner.folder import (
    create_run_folder,
    environment_facts,
    read_facts,
    recording_end,
    reopen_run_folder,
    write_code_diff,
    write_config,
    write_facts,
)
from runner.forecast import Inspected, look_ahead, make_case
from runner.logs import log_to
from runner.provenance import Provenance
from runner.restart import begun_by_this_job, run_with_restarts
from runner.stop import PRUNED
from runner.summary import final_loss, say_stopped, summarize
from runner.train import engine_options, run_rank
from runner.watchdog import end_process


def run(config: Mapping[str, Any], where: Provenance, command: Sequence[str], began: float) -> float:
    """One run from start to end; returns its final loss (eval, else train; NaN where neither was logged).

    Or what is known of it before it starts (``run.preflight``), and NaN.

    Args:
        began: when, in seconds since the epoch: ``run.max_time`` counts from there.

    Raises:
        ConfigError: before any rank starts.
        TrainingError: a rank failed.
        SystemExit: with code 0, where a signal has stopped it: of a sweep, no other job is to begin.
    """
    launch = Launch(config, where, command, began)
    if launch.experiment.run.preflight != "check":
        return look_ahead(launch.inspect(), launch.config, launch.experiment.run, where.point)
    if join.is_joined(os.environ):
        return launch.joined()
    folder = launch.prepare()
    restarts = launch.experiment.run.max_restarts
    with recording_end(folder):
        if launch.world_size > 1 or restarts:
            run_with_restarts(folder, launch.world_size, restarts)
        else:
            run_rank(folder)
        return launch.conclude(folder)


class Launch:
    """A checked experiment, its device and its number of ranks."""

    def __init__(
        self,
        config: Mapping[str, Any],
        where: Provenance,
        command: Sequence[str],
        began: float | None = None,
    ) -> None:
        self.config, self.where, self.command = config, where, command
        self.began = time.time() if began is None else began
        self.experiment = build_experiment(config, where)
        self.console = terminal(self.experiment.logger)
        if self.experiment.run.init_from is not None:  # ranks read the checkpoint that is the newest now
            point = str(self.experiment.model.initial_checkpoint)
            self.config = {**config, "run": {**config["run"], "init_from": point}}
        self.reference = resolve_reference(
            self.experiment.stage, self.experiment.model, self.experiment.adapter
        )
        run, joined = self.experiment.run, join.is_joined(os.environ)
        preflight.check_modes(run.preflight, run.devices, run.device_name, joined=joined)
        self.device = preflight.resolve_device(run.device, run.device_name)
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        self.world_size = self.experiment.parallelism.world_size(os.environ, gpus)
        self.local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if run.preflight == "check":
            preflight.check_ranks(self.world_size, self.device, self.local_ranks)
        preflight.check_restarts(run.max_restarts, joined)
        preflight.check_shared_name(
            run.resume, of_sweep=where.point is not None, named=where.given("run.name")
        )
        if run.preflight == "only" and not where.given("run.global_batch_size"):
            self.assume_batch()

    def assume_batch(self) -> None:
        """A forecast of a large layout need not be told what a batch is; a run has to be."""
        run = self.experiment.run
        unit = run.micro_batch_size * self.experiment.parallelism.data_size(self.world_size)
        assumed = preflight.next_batch(run.global_batch_size, unit)
        if assumed != run.global_batch_size:
            said = f"run.global_batch_size is not given, and {assumed} is assumed"
            self.console.print(said, highlight=False)
            self.experiment = replace(self.experiment, run=replace(run, global_batch_size=assumed))
            self.config = {**self.config, "run": {**self.config["run"], "global_batch_size": assumed}}

    def joined(self) -> float:
        """Under torchrun or srun: rank 0 does what the parent does elsewhere."""
        store = join.meet(os.environ)
        folder = join.agree_on_folder(store, os.environ, self.prepare, self.prepare_data)

        def give_up(error: TrainingError) -> None:
            report(folder, error, stalled=True)
            end_process(error)

        if os.environ["RANK"] != "0":
            with reporting(folder):
                run_rank(folder, give_up)
            return final_loss(folder)
        with recording_end(folder):
            with reporting(folder):
                run_rank(folder, give_up)
            return self.conclude(folder)

    def conclude(self, folder: Path) -> float:
        """Says how the run went and where things are."""
        stopped = read_facts(folder)["stopped"]
        if stopped is None:
            summarize(self.experiment, folder)
        else:
            goes_on = say_stopped(self.experiment.run, folder, stopped, self.command, self.where.overrides)
            if goes_on and stopped["reason"] in slurm.REASONS:
                slurm.queue_again(os.environ)
            if stopped["reason"] not in ("run.max_time", PRUNED):
                raise SystemExit(0)
        return final_loss(folder)

    def prepare(self) -> Path:
        """Checks everything that can be checked here, prepares the data, and fills the run folder."""
        run, found = self.experiment.run, self.inspect()
        data, resume, own = found.data, found.resume, self.own
        preflight.check_fits(found.case)
        survey = preflight.survey(found.case, self.config)
        if own is None and run.resume == "auto" and resume is not None:
            own = resume.parent.parent
        if own is None:
            folder = create_run_folder(run.output_dir, run.name)
        else:
            folder = reopen_run_folder(own.absolute(), preflight.steps_done(resume))
            forget_reports(folder)
        point = self.where.point
        if point is not None:
            point.began(folder)
        reference = self.precomputed(data)
        write_config(folder, self.config)
        write_facts(
            folder,
            **environment_facts(self.command),
            began=self.began,
            stopped=None,
            ended=None,
            restarts=0,
            world_size=self.world_size,
            device=self.device,
            error=None,
            overrides=list(self.where.overrides),
            resumed_from=None if resume is None else str(resume.absolute()),
            sweep=None if point is None else {"folder": str(point.sweep), "number": point.number},
            slurm=slurm.job_facts(os.environ),
            identity=vars(found.identity),
            reference=reference,
            data=data.to_json(),
        )
        write_code_diff(folder)
        (folder / "audit.json").write_text(data.audit.to_json())
        (folder / "preflight.json").write_text(survey.to_json())
        self.console.print(data.audit.render(), survey.render(), sep="\n")
        self.console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)
        return folder

    def inspect(self) -> Inspected:
        """Checks everything that can be checked here, and prepares the data."""
        model = self.check_components()
        with log_to(None, self.console):
            data = self.prepare_data()
        peak = self.experiment.optimizer.lr
        self.experiment.scheduler.check(peak=peak, total_steps=data.num_steps)
        identity = self.identity(model, data)
        resume = self.resume_point(identity, data)
        case = make_case(
            self.experiment,
            self.reference,
            model,
            data,
            world_size=self.world_size,
            kind=self.device,
            local_ranks=self.experiment.run.devices or self.local_ranks,
        )
        return Inspected(data, identity, resume, case)

    def check_components(self) -> Any:
        """Each by itself and with the layout; returns the model, on the meta device."""
        run, experiment = self.experiment.run, self.experiment
        if run.preflight != "plan":  # which looks for another layout
            data_size = experiment.parallelism.data_size(self.world_size)
            preflight.check_batch(run.global_batch_size, run.micro_batch_size, data_size)
        preflight.check_shared_prompt(experiment.data.share_prompt, experiment.parallelism)
        preflight.check_further_tokens(experiment.model.mtp_layers, experiment.stage.kind)
        for logger in experiment.logger.values():
            logger.check()
        model = experiment.model.build(experiment.model.config())
        preflight.check_adapter(experiment.adapter, model, experiment.model.bias_rate)
        self.check_layout(model, experiment.adapter)
        if run.verify and run.init_from is not None:
            check_whole(experiment.model.initial_checkpoint, checksums=True, option="run.init_from")
        experiment.model.weights(run.seed)  # opened only: what is missing shows before a rank starts
        if self.reference.other:
            with about_reference():
                self.check_layout(self.reference.model.build(self.reference.model.config()))
            self.reference.check(model.config, experiment.model.load_tokenizer())
        return model

    def identity(self, model: Any, data: Any) -> RunIdentity:
        run = self.experiment.run
        return RunIdentity(
            model=self.experiment.model.signature(model),
            data=data.identity,
            optimizer=type(self.experiment.optimizer).__name__.lower(),
            reference=self.reference.origin,
            seed=run.seed,
            global_batch_size=run.global_batch_size,
            **self.frozen(model),
        )

    @functools.cached_property
    def own(self) -> Path | None:
        """The folder of an earlier start of this run, which SLURM starts again."""
        run = self.experiment.run
        return begun_by_this_job(Path(run.output_dir, run.name), self.command, os.environ)

    def resume_point(self, identity: RunIdentity, data: Any) -> Path | None:
        """The checkpoint to go on from, where the run has steps left from there; None: a new run."""
        run = self.experiment.run
        with log_to(None, self.console):
            saved = None if self.own is None else newest_undamaged(self.own / "checkpoints")
            asked = Resume(str(saved or run.resume), verify=run.verify, force=run.resume_force)
            resume = asked.point(Path(run.output_dir), run.name, identity)
        # The same run was checked when it began; its export may be all that is left.
        if saved is not None:
            return resume
        if run.resume != "auto":  # which begins with the weights where there is nothing to go on with
            preflight.check_start(self.config["run"]["init_from"], resume)
        preflight.check_length(run.eval_every, data.eval is not None, data.num_steps, resume)
        preflight.check_early_stop(run.early_stop, run.metric_mode, run.patience, resume)
        if run.profile:
            left = data.num_steps - preflight.steps_done(resume)
            preflight.check_profile(run.profile_steps[1], run.profile_ranks, left, self.world_size)
        return resume

    def precomputed(self, data: Any) -> dict[str, Any] | None:
        """Where the log-probabilities of the reference are, and whether ranks have to compute some first."""
        run, source = self.experiment.run, self.reference
        if source.choice != "precomputed":
            return None
        folder = source.folder(self.experiment.data.cache(), run.seed, run.dtype)
        lacking: bool = data.lacks_reference(folder)
        how = "computed now, once, into" if lacking else "read from"
        self.console.print(f"reference: {how} {folder}", soft_wrap=True, highlight=False)
        return {"folder": str(folder), "compute": lacking}

    def check_layout(self, model: Any, adapter: Any = None) -> None:
        """Whether the engine computes ``model``, which is on the meta device, in this layout."""
        run, experiment = self.experiment.run, self.experiment
        if run.preflight == "plan":
            return
        options = engine_options(experiment, self.device, adapter=adapter)
        experiment.parallelism.check(model, experiment.optimizer, options, world_size=self.world_size)

    def frozen(self, model: Any) -> dict[str, str]:
        """The part of the run's identity that is there where a part of the model is not trained."""
        experiment = self.experiment
        if experiment.adapter is not None:
            trained = experiment.adapter.signature(model)
        elif experiment.model.freeze:
            trained = experiment.model.trained_signature(model)
        else:
            return {}
        return {"trained": trained, "base": experiment.model.content()}

    def prepare_data(self) -> Any:
        """Tokens and plans in the cache of this machine's filesystem."""
        run, experiment = self.experiment.run, self.experiment
        stage, data = experiment.stage, experiment.data
        preflight.check_normalisation(getattr(stage, "normalize", None), data.resolve_packing(stage.kind))
        tokenizer = experiment.model.load_tokenizer()
        preflight.check_model_fits_data(experiment.model.config(), tokenizer, data.max_length)
        return data.prepare(
            stage.kind,
            tokenizer,
            seed=run.seed,
            global_batch_size=run.global_batch_size,
            max_steps=run.max_steps,
            epochs=run.epochs,
        )
