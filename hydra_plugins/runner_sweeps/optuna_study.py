"""The study of a sweep: Optuna's record of its trials, in a file to which many processes write."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from components.contracts.errors import ConfigError
from hydra_plugins.runner_sweeps.search_space import SearchSpace
from runner.config.sources import did_you_mean
from runner.records.job_record import JobRecord
from runner.records.run_record import RunRecord, stop_reason

if TYPE_CHECKING:
    from optuna import Study
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

T = TypeVar("T")

JOURNAL, NAME = "study.journal", "sweep"
SEARCHES = "searches"
"""The attribute of a study that holds the overrides of its command."""

FINISHED = ("completed", "pruned", "invalid", "failed")
"""Statuses that end a trial. A job with any other status runs again, unless ``ran_out_of_time``."""


def storage_in(sweep: Path) -> "JournalStorage":
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.storages.JournalStorage(JournalFileBackend(str(sweep / JOURNAL)))


def open_study(sweep: Path, space: SearchSpace) -> "Study":
    """Open the study of ``sweep``, or create it if there is none.

    Raises:
        ConfigError: if the study has another search space.
    """
    import optuna

    study = optuna.create_study(storage=storage_in(sweep), study_name=NAME, load_if_exists=True)
    before, now = study.user_attrs.get(SEARCHES), space.to_json()
    if before is None:
        study.set_user_attr(SEARCHES, now)
    elif before != now:
        changed = " ".join(sorted(set(before) ^ set(now)))
        raise ConfigError(
            f"hydra.sweeper.study_name: the study in {sweep} is of another command, which differs in "
            f"{changed}; give another name, or that command."
        )
    return study


def ask_trial(study: "Study", space: SearchSpace, sampler: "BaseSampler") -> "FrozenTrial":
    """Create and return the next trial, whose number is the count of earlier trials."""
    from optuna.samplers import RandomSampler

    study.sampler = sampler
    number = study.ask(space.distributions()).number
    study.sampler = RandomSampler()  # at the last trial of a grid, GridSampler would stop Optuna's own loop
    return study.get_trials(deepcopy=False)[number]


def check_sampler(
    sampler: "BaseSampler", options: Mapping[str, object] | None, space: SearchSpace, n_trials: int
) -> None:
    """Raise ConfigError if ``sampler`` fails with its ``options`` in as many trials as it begins with.

    The trials are in memory, so that a failure leaves no unfinished one in the study of a sweep.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    try:
        random = int(str((options or {}).get("n_startup_trials", 10)))
        for _ in range(min(random + 1, n_trials)):  # after the random ones, the other options are read
            study.tell(ask_trial(study, space, sampler).number, 0.0)
    except (TypeError, ValueError) as error:
        raise wrong_options("sampler", error) from error


def tell_trial(study: "Study", trial: "FrozenTrial", record: JobRecord | None) -> bool:
    """Report ``record`` to the study; return whether ``trial`` has ended. False means that it runs again."""
    from optuna.trial import TrialState

    if record is None:
        return False
    if record.status == "pruned":
        study.tell(trial.number, state=TrialState.PRUNED)
    elif record.loss is not None and (record.status == "completed" or ran_out_of_time(record)):
        study.tell(trial.number, record.loss)
    elif record.status in FINISHED:
        study.tell(trial.number, state=TrialState.FAIL)
    else:
        return False
    return True


def ran_out_of_time(job: JobRecord) -> bool:
    """Return whether ``run.max_time`` has ended the job, with a loss that compares with those of other jobs.

    It has not if the job continues when it runs again (``checkpoint.resume=auto``).
    """
    from runner.records.run_dir import read_run_config  # imports torch

    if job.status != "interrupted" or stop_reason(job.folder) != "run.max_time":
        return False
    folder = Path(str(job.folder))
    run = RunRecord.read(folder)
    comparable = "eval/loss" in run.results.last or not run.data.get("eval")
    return comparable and read_run_config(folder)["checkpoint"].get("resume") != "auto"


def make_sampler(
    name: str, options: Mapping[str, object] | None, seed: int, number: int, space: SearchSpace
) -> "BaseSampler":
    """Make a new sampler for trial ``number``, with which a resumed sweep samples the same values.

    Raises:
        ConfigError: if Optuna has no sampler called ``name``, an entry of ``options`` is ``seed`` or not an
            argument of the sampler, or a grid is not possible.
    """
    from optuna.samplers import GridSampler, RandomSampler, TPESampler

    if isinstance(options, Mapping) and "seed" in options:
        raise ConfigError(
            "hydra.sweeper.sampler_options: has a seed, but the search has one already; "
            "use hydra.sweeper.seed."
        )
    # The sum of the two would give searches with neighbouring seeds almost the same trials.
    own = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])
    kinds: dict[str, Callable[..., BaseSampler]] = {
        "tpe": partial(TPESampler, seed=own),
        "random": partial(RandomSampler, seed=own),
        "grid": partial(GridSampler, space.grid() if name == "grid" else {}, seed=seed % 2**32),
    }
    return make_optuna("sampler", name, kinds, options)


def make_pruner(name: str, options: Mapping[str, object] | None) -> "BasePruner | None":
    """Make the pruner. None means that no run ends early.

    Raises:
        ConfigError: if there is no such pruner, or it has no such options.
    """
    from optuna.pruners import MedianPruner, SuccessiveHalvingPruner

    kinds: dict[str, Callable[..., BasePruner | None]] = {
        "none": lambda: None,
        "median": MedianPruner,
        "asha": SuccessiveHalvingPruner,
    }
    return make_optuna("pruner", name, kinds, options)


def make_optuna(
    key: str, name: str, kinds: Mapping[str, Callable[..., T]], options: Mapping[str, object] | None
) -> T:
    if name not in kinds:
        raise ConfigError(f"hydra.sweeper.{key}: there is no {name}; {did_you_mean(str(name), kinds)}")
    try:
        return kinds[name](**(options or {}))
    except (TypeError, ValueError) as error:
        raise wrong_options(key, error) from error


def wrong_options(key: str, error: Exception) -> ConfigError:
    return ConfigError(f"hydra.sweeper.{key}_options: {error}; use those of Optuna's documentation, or null.")


class TrialPruner:
    """The pruner of a job, which reports evaluations to the study and returns whether to end the run."""

    def __init__(
        self, number: int, sweep: str, pruner: str, pruner_options: Mapping[str, object] | None
    ) -> None:
        import optuna

        storage = storage_in(Path(sweep))
        study = optuna.load_study(
            storage=storage, study_name=NAME, pruner=make_pruner(pruner, pruner_options)
        )
        place = storage.get_study_id_from_name(NAME)
        self.trial = optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(place, number))

    def __call__(self, step: int, loss: float) -> bool:
        self.trial.report(loss, step)
        return self.trial.should_prune()
