"""The search space of a sweep: Hydra's syntax becomes Optuna's distributions."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from components.contracts.errors import ConfigError
from hydra_plugins.runner_sweeps.search_space import SearchSpace


def space(*overrides: str) -> SearchSpace:
    return SearchSpace.of(OverridesParser.create().parse_overrides([*overrides]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tag(log, interval(1e-5, 1e-2))", FloatDistribution(1e-5, 1e-2, log=True)),
        ("interval(1, 5)", FloatDistribution(1.0, 5.0)),
        ("int(interval(1, 5))", IntDistribution(1, 5)),
        ("tag(log, int(interval(1, 64)))", IntDistribution(1, 64, log=True)),
        ("range(1, 8, 3)", IntDistribution(1, 7, step=3)),
        ("range(8, 1, -3)", IntDistribution(2, 8, step=3)),
        ("range(0, 1, 0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("range(0, 1, 0.3)", FloatDistribution(0.0, 0.9, step=0.3)),
        ("1e-3,2", CategoricalDistribution(["0.001", "2"])),
        ("null,[0.9, 0.99]", CategoricalDistribution(["null", "[0.9,0.99]"])),
        ("shuffle(a, b)", CategoricalDistribution(["a", "b"])),
    ],
)
def test_distributions(words: str, expected: BaseDistribution) -> None:
    assert space(f"run.x={words}").distributions() == {"run.x": expected}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tag(log, interval(0, 1))", "0 < low < high"),
        ("interval(2, 1)", "low < high"),
        ("range(3, 1)", "is empty"),
        ("tag(lgo, interval(1, 2))", "only tag is log"),
        ("tag(log, choice(1, 2))", "only tag is log"),
    ],
)
def test_what_nothing_can_be_drawn_from(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        space(f"run.x={words}").distributions()


def test_a_command_that_sweeps_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing is swept"):
        space("stage=pt")


def test_jobs_have_what_is_fixed_and_what_is_drawn() -> None:
    found = space("+a.b=1,2", "stage=pt", "~c", "stage=sft", "lr=interval(0, 1)")
    assert found.overrides({"+a.b": "2", "lr": 0.5}) == ["stage=sft", "~c", "+a.b=2", "lr=0.5"]
    assert found.examples() == [
        ["stage=sft", "~c", "+a.b=1", "lr=0.0"],
        ["stage=sft", "~c", "+a.b=2", "lr=0.0"],
    ]


def test_a_grid() -> None:
    assert space("a=x,y", "b=range(1, 4)").size() == 6
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.sampler: is grid, but b=interval"):
        space("a=x,y", "b=interval(1, 4)").grid()


def test_the_last_value_of_a_key_counts_however_it_is_written() -> None:
    fixed = space("run.x=1,2", "++run.y=3", "run.y=4", "+run.z=5,6")
    assert fixed.fixed == ("run.y=4",)
    assert fixed.overrides({"run.x": 2, "+run.z": 6}) == ["run.y=4", "run.x=2", "+run.z=6"]
    with pytest.raises(ConfigError, match="nothing is swept"):
        space("run.x=1,2", "++run.x=3")
