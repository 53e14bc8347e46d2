"""``hydra/sweeper=optuna``: Optuna chooses the points of a sweep, and keeps its study on disk."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from components.contracts.errors import ConfigError
from hydra_plugins.runner_sweeps.optuna_study import (
    ask_trial,
    check_sampler,
    make_pruner,
    make_sampler,
    open_study,
    tell_trial,
)
from hydra_plugins.runner_sweeps.search_space import SearchSpace, as_overrides
from runner.distribution import pip_install
from runner.launch.run_lock import locked
from runner.records.job_record import SWEEP_FOLDER, JobRecord, SweepJob, read_job_record
from runner.sweeps.sweep import create_sweep
from runner.training.pruner import leave_no_pruner, leave_pruner

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

PRUNER = "hydra_plugins.runner_sweeps.optuna_study:TrialPruner"


@dataclass(eq=False)
class OptunaSweeper(Sweeper):
    """A sweeper in which trial n is job n; conf/hydra/sweeper/optuna.yaml describes every option."""

    n_trials: int
    n_jobs: int
    sampler: str
    sampler_options: Mapping[str, object] | None
    pruner: str
    pruner_options: Mapping[str, object] | None
    seed: int
    study_name: str
    params: Mapping[str, str] | None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the options and instantiate the launcher.

        Raises:
            ConfigError: if Optuna is not installed, or an option has a wrong value.
        """
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError(f"hydra/sweeper=optuna: Optuna is not installed; {pip_install('sweep')}.")
        # The launcher first: n_jobs is by default its number of jobs.
        self.config, self.loader = config, hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
        for key, least in (("n_trials", 1), ("n_jobs", 1), ("seed", 0)):
            value = getattr(self, key)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"hydra.sweeper.{key}: must be at least {least}, got {value!r}.")

    def sweep(self, arguments: list[str]) -> None:
        """Run the unfinished trials of an earlier command, then new ones up to ``n_trials``.

        A dry run of the launcher shows examples of jobs and makes no study, which would fix the search space.

        Raises:
            ConfigError: if the command differs from that of the study that it resumes, sweeps nothing or has
                a wrong option, or if another command uses the sweep folder.
        """
        from runner.cli import as_given

        sweep = Path(os.environ[SWEEP_FOLDER])
        parser = OverridesParser.create(config_loader=self.loader)
        space = SearchSpace.of(parser.parse_overrides([*as_overrides(self.params), *arguments]))
        sweep.mkdir(parents=True, exist_ok=True)
        with locked(sweep, "hydra.sweeper.study_name"):
            create_sweep(sweep, as_given(self.config.hydra), resumes=True)
            self.check(space)
            if self.config.hydra.launcher.get("dry_run"):
                self.launcher.launch(space.examples()[: min(self.n_jobs, self.n_trials)], initial_job_idx=0)
                return
            study = open_study(sweep, space)
            self.leave_pruner(sweep)
            self.launch(study, space, sweep, unfinished(study, space, sweep))
            while new := self.chosen(study, space):
                self.launch(study, space, sweep, new)

    def check(self, space: SearchSpace) -> None:
        """Check distributions, sampler, pruner and choices before the first job.

        Raises:
            ConfigError: if one of them is wrong, or a pruner is chosen for a run without evaluations.
        """
        space.distributions()
        sampler = make_sampler(self.sampler, self.sampler_options, self.seed, 0, space)
        check_sampler(sampler, self.sampler_options, space, self.most_trials(space))
        examples = space.examples()
        first, *_ = [self.loader.load_sweep_config(self.config, example) for example in examples]
        evaluates = first.run.eval_every or first.run.eval_every_epochs
        if make_pruner(self.pruner, self.pruner_options) is not None and not evaluates:
            raise ConfigError(
                f"hydra.sweeper.pruner: {self.pruner} needs evaluations during the run, and the only one "
                "is at the end (run.eval_every=0); set run.eval_every, or hydra.sweeper.pruner=none."
            )

    def most_trials(self, space: SearchSpace) -> int:
        return min(self.n_trials, space.size()) if self.sampler == "grid" else self.n_trials

    def leave_pruner(self, sweep: Path) -> None:
        if self.pruner == "none":
            leave_no_pruner(sweep)
        else:
            options = {"pruner": self.pruner, "pruner_options": dict(self.pruner_options or {})}
            leave_pruner(sweep, PRUNER, {"sweep": str(sweep)} | options)

    def chosen(self, study: "Study", space: SearchSpace) -> "list[FrozenTrial]":
        """Ask the study for the next trials: ``n_jobs``, or fewer at the end."""
        known = study.get_trials(deepcopy=False)
        missing = self.most_trials(space) - len(with_values(known, space))
        return [
            ask_trial(
                study, space, make_sampler(self.sampler, self.sampler_options, self.seed, number, space)
            )
            for number in range(len(known), len(known) + min(self.n_jobs, missing))
        ]

    def launch(
        self, study: "Study", space: SearchSpace, sweep: Path, trials: "Sequence[FrozenTrial]"
    ) -> None:
        for group in consecutive(trials):
            jobs = [space.overrides(trial.params) for trial in group]
            for answer in self.launcher.launch(jobs, initial_job_idx=group[0].number):
                assert answer.return_value is not None  # raises an error that a job could not record
            for trial in group:
                tell_trial(study, trial, outcome_of(sweep, trial))


def unfinished(study: "Study", space: SearchSpace, sweep: Path) -> "list[FrozenTrial]":
    """Return the trials of an earlier command to run again; report to the study those that have ended."""
    from optuna.trial import TrialState

    running = with_values(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)), space)
    return [trial for trial in running if not tell_trial(study, trial, outcome_of(sweep, trial))]


def with_values(trials: "Sequence[FrozenTrial]", space: SearchSpace) -> "list[FrozenTrial]":
    """Return the trials that have all their values.

    If a command ends while the values of a trial are chosen, this trial never has a job and does not count.
    """
    return [trial for trial in trials if trial.params.keys() >= space.swept.keys()]


def outcome_of(sweep: Path, trial: "FrozenTrial") -> JobRecord | None:
    path = SweepJob(sweep, trial.number, ()).path
    return read_job_record(path) if path.exists() else None


def consecutive(trials: "Sequence[FrozenTrial]") -> "Iterator[list[FrozenTrial]]":
    """Yield groups of trials with consecutive numbers, as a launcher numbers the jobs of one call."""
    group: list[FrozenTrial] = []
    for trial in trials:
        if group and trial.number != group[-1].number + 1:
            yield group
            group = []
        group.append(trial)
    if group:
        yield group
