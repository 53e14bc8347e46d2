"""``hydra/sweeper=optuna``: searches that resume, failed trials, pruning, and mistakes in the options."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from optuna.trial import FrozenTrial, TrialState

from components.contracts.errors import ConfigError, TrainingError
from hydra_plugins.runner_sweeps.optuna_study import NAME, storage_in
from runner.config.sources import ConfigSources
from runner.launch.run_lock import locked
from runner.records.job_record import JobRecord, read_job_records
from runner.records.run_dir import write_config
from runner.records.run_record import RunRecord, Stopped
from runner.records.run_summary import Results
from runner.sweeps.sweep import create_sweep
from tests.e2e.commands import SMALL, call_here, rows

SEARCH = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.study_name=s", "hydra.sweeper.n_trials=8")
LR = "optimizer.lr=tag(log, interval(1e-5, 1e-1))"

Run = Callable[..., float]


def distance(config: Any, *_: Any) -> float:
    """Return the distance from the best learning rate in powers of ten, plus the seed."""
    return abs(math.log10(config["optimizer"]["lr"]) + 3) + config["run"]["seed"]


def search(folder: Path, *overrides: str) -> int:
    GlobalHydra.instance().clear()
    return call_here(*SEARCH, f"run.output_dir={folder}", *overrides)


def trials(folder: Path) -> list[FrozenTrial]:
    return optuna.load_study(storage=storage_in(folder / "sweeps/s"), study_name=NAME).get_trials()


def outcomes(folder: Path) -> list[JobRecord]:
    return read_job_records(folder / "sweeps/s")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    return lambda run: monkeypatch.setattr("runner.launch.run.run", run)


def test_a_search_finds_it_and_says_what_it_was(
    tmp_path: Path, runs: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    runs(distance)
    assert search(tmp_path, LR, "run.seed=0,1", "hydra.sweeper.n_trials=16") == 0
    found, best = trials(tmp_path), yaml.safe_load((tmp_path / "sweeps/s/best.yaml").read_text())
    assert len(found) == 16
    losses = [outcome.loss for outcome in outcomes(tmp_path)]
    assert [trial.value for trial in found] == losses
    assert best["loss"] == min(losses)
    assert best["overrides"][-1] == "run.seed=0"
    assert [trial.number for trial in found] == [outcome.number for outcome in outcomes(tmp_path)]
    assert f"best: job {best['job']}, loss {best['loss']:.4f}" in capsys.readouterr().out


def test_an_interrupted_search_goes_on_and_draws_what_it_would_have_drawn(
    tmp_path: Path, runs: Callable[[Run], None]
) -> None:
    """The interruption is in the fourth job, in the second batch of two."""
    more = (LR, "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler_options={n_startup_trials:3}")
    runs(distance)
    assert search(tmp_path / "straight", *more) == 0
    calls: list[float] = []

    def interrupted(config: Any, *rest: Any) -> float:
        calls.append(distance(config))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]

    runs(interrupted)
    assert search(tmp_path / "twice", *more) == 130
    states = [trial.state for trial in trials(tmp_path / "twice")]
    assert states == [TrialState.COMPLETE] * 2 + [TrialState.RUNNING] * 2
    assert search(tmp_path / "twice", *more) == 0
    assert len(calls) == 9, "only the fourth was run again"
    straight, twice = trials(tmp_path / "straight"), trials(tmp_path / "twice")
    assert [trial.params for trial in twice] == [trial.params for trial in straight]
    assert [trial.value for trial in twice] == [trial.value for trial in straight]
    assert len({trial.value for trial in twice}) == 8
    assert search(tmp_path / "twice", LR) == 0
    assert len(calls) == 9, "nothing was missing"


def test_searches_with_other_seeds_have_no_trial_in_common(
    tmp_path: Path, runs: Callable[[Run], None]
) -> None:
    runs(distance)
    drawn = set()
    for seed in ("0", "1"):
        assert search(tmp_path / seed, LR, "hydra.sweeper.n_trials=2", f"hydra.sweeper.seed={seed}") == 0
        drawn |= {trial.params["optimizer.lr"] for trial in trials(tmp_path / seed)}
    assert len(drawn) == 4


def test_what_fails_or_is_refused_is_no_point_to_learn_from(
    tmp_path: Path, runs: Callable[[Run], None]
) -> None:
    def run(config: Any, *_: Any) -> float:
        seed = config["run"]["seed"]
        if seed == 1:
            raise ConfigError("run.seed: 1")
        if seed == 2:
            raise TrainingError("2")
        return math.nan if seed == 3 else seed

    runs(run)
    grid = ("run.seed=range(0,5)", "hydra.sweeper.sampler=grid")
    assert search(tmp_path, *grid) == 1
    found = {trial.params["run.seed"]: trial for trial in trials(tmp_path)}
    assert sorted(found) == [0, 1, 2, 3, 4], "each point of the grid once"
    states = [found[seed].state for seed in range(5)]
    assert states == [TrialState.COMPLETE, *[TrialState.FAIL] * 3, TrialState.COMPLETE]
    runs(distance)
    assert search(tmp_path, *grid) == 1, "what has failed is not run again"
    assert len(outcomes(tmp_path)) == 5


@pytest.mark.parametrize(
    ("data", "results", "resume", "ends"),
    [
        ({}, {}, "null", True),
        ({"eval": {"eval": {}}}, {"eval/loss": 1.0}, "null", True),
        ({"eval": {"eval": {}}}, {"train/loss": 1.0}, "null", False),
        ({}, {}, "auto", False),
    ],
)
def test_trials_that_run_out_of_time_count(
    data: Any, results: Any, resume: str, ends: bool, tmp_path: Path, runs: Callable[[Run], None]
) -> None:
    """Unless their loss is not that of an evaluation, as in other trials, or they continue."""
    began: list[float] = []

    def run(config: Any, where: ConfigSources, *_: Any) -> float:
        assert where.sweep_job is not None
        where.sweep_job.mark_running(tmp_path)
        write_config(tmp_path, config)
        stopped = Stopped(1, 4, "run.max_time")
        RunRecord(stopped=stopped, data=data, results=Results(last=results)).write(tmp_path)
        began.append(distance(config))
        return began[-1]

    runs(run)
    for _ in range(2):
        assert search(tmp_path, LR, "hydra.sweeper.n_trials=2", f"checkpoint.resume={resume}") == 0
    assert [trial.value for trial in trials(tmp_path)] == (began if ends else [None] * 2)
    assert len(began) == (2 if ends else 4)


def test_runs_that_are_worse_than_others_end_early(tmp_path: Path) -> None:
    """The third of three real runs is pruned, whose learning rate is too low to learn anything."""
    arguments = [
        "hydra.sweeper.sampler=grid",
        "hydra.sweeper.seed=3",
        "hydra.sweeper.pruner=median",
        "hydra.sweeper.pruner_options={n_startup_trials:2}",
        "optimizer.lr=1e-2,5e-3,1e-5",
        *SMALL,
        "run.eval_every=2",
        "run.export=false",
        "scheduler=constant",
    ]
    assert search(tmp_path, *arguments) == 0
    *better, worst = outcomes(tmp_path)
    assert "optimizer.lr=1e-05" in worst.overrides
    assert [outcome.status for outcome in better] == ["completed", "completed"]
    assert worst.status == "pruned"
    facts = json.loads((Path(str(worst.folder)) / "run.json").read_text())
    assert facts["stopped"] == {"step": 2, "of": 4, "reason": "pruned"}
    told = trials(tmp_path)[-1]
    evaluated = {row["step"]: row["eval/loss"] for row in rows(Path(str(worst.folder)), "eval/loss")}
    assert (told.state, told.intermediate_values) == (TrialState.PRUNED, evaluated)
    assert told.value == worst.loss == evaluated[2]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["optimizer.lr=1e-3"], ["hydra/sweeper=optuna", "nothing is swept"]),
        ([LR, "hydra.sweeper.sampler=tpo"], ["hydra.sweeper.sampler", "did you mean 'tpe'"]),
        ([LR, "hydra.sweeper.sampler=grid"], ["hydra.sweeper.sampler: is grid", "interval", "sampler=tpe"]),
        ([LR, "hydra.sweeper.sampler_options={n:1}"], ["hydra.sweeper.sampler_options", "'n'"]),
        ([LR, "hydra.sweeper.sampler_options={seed:1}"], ["has a seed", "use hydra.sweeper.seed"]),
        (
            [LR, "hydra.sweeper.sampler_options={n_startup_trials:abc}"],
            ["hydra.sweeper.sampler_options", "'abc'"],
        ),
        (
            [LR, "hydra.sweeper.sampler_options={n_startup_trials:1,n_ei_candidates:abc}"],
            ["hydra.sweeper.sampler_options", "use those of Optuna"],
        ),
        ([LR, "hydra.sweeper.pruner=halving"], ["hydra.sweeper.pruner", "asha"]),
        ([LR, "hydra.sweeper.pruner=median"], ["hydra.sweeper.pruner", "run.eval_every"]),
        ([LR, "hydra.sweeper.n_trials=0"], ["hydra.sweeper.n_trials", "at least 1"]),
        ([LR, "hydra.sweeper.n_jobs=two"], ["hydra.sweeper.n_jobs", "'two'"]),
        ([LR, "hydra.sweeper.trials=3"], ["hydra.sweeper.trials", "nothing reads this key"]),
        ([LR, "parallelism=single,fsdp3"], ["parallelism=fsdp3", "fsdp2"]),
        (
            [LR, "hydra/launcher=local", "hydra.launcher.jobs=0"],
            ["error: hydra.launcher.jobs", "at least 1"],
        ),
    ],
)
def test_mistakes(
    tmp_path: Path, wrong: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tmp_path, *wrong) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert all(word in said for word in words), said
    assert not outcomes(tmp_path)


def test_a_trial_whose_values_were_not_chosen_does_not_run(
    tmp_path: Path, runs: Callable[[Run], None]
) -> None:
    """The seed of a grid may be larger than those of NumPy."""
    grid = ("hydra.sweeper.sampler=grid", "hydra.sweeper.seed=1099511627776", "run.seed=0,1")
    runs(distance)
    assert search(tmp_path, *grid, "hydra.sweeper.n_trials=1") == 0
    study = optuna.load_study(storage=storage_in(tmp_path / "sweeps/s"), study_name=NAME)
    study.ask()  # killed after that
    for _ in range(2):  # the second command has nothing to do
        assert search(tmp_path, *grid, "hydra.sweeper.n_trials=2") == 0
    assert [trial.state for trial in trials(tmp_path)] == [
        TrialState.COMPLETE,
        TrialState.RUNNING,
        TrialState.COMPLETE,
    ]
    assert [outcome.number for outcome in outcomes(tmp_path)] == [0, 2]


@pytest.mark.parametrize("name", ["a/b", "../../escaped", "/escaped", "..", ".", ".a", "''", "a b"])
def test_a_study_that_is_not_a_folder_of_sweeps_makes_none(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(tmp_path / "a/b", LR, f"hydra.sweeper.study_name={name}") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: hydra.sweeper.study_name: ")
    assert "use letters, digits, '_', '+', '-' and '.', but no leading '.'" in said
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_is_refused_leaves_the_files_of_the_running_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_sweep(tmp_path / "sweeps/s", ["run.seed=1,2"])
    written = (tmp_path / "sweeps/s/sweep.json").read_text()
    with locked(tmp_path / "sweeps/s"):
        assert search(tmp_path, LR) == 2
    assert f"hydra.sweeper.study_name: {tmp_path / 'sweeps/s'} is in use by " in capsys.readouterr().err
    assert (tmp_path / "sweeps/s/sweep.json").read_text() == written


def test_a_study_is_of_one_command(
    tmp_path: Path, runs: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    runs(distance)
    assert search(tmp_path, LR, "hydra.sweeper.n_trials=1") == 0
    assert search(tmp_path, LR, "hydra.sweeper.n_trials=2") == 0, "a longer search is the same"
    assert search(tmp_path, LR, "stage=pt") == 2
    assert "is of another command, which differs in stage=pt" in capsys.readouterr().err
