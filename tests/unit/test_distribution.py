"""Hints name the installed distribution."""

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from components.contracts.errors import ConfigError
from runner import cli, distribution
from runner.commands import export, report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Yield the console scripts of an environment, which by default holds an earlier name as well."""
    scripts = [
        SimpleNamespace(name=name, value=value, dist=SimpleNamespace(name=package, version="1.2"))
        for name, value, package in (
            ("samecurve", "runner.cli:main", "samecurve"),
            ("runner", "runner.cli:main", "runner"),
            ("wandb", "wandb.cli:main", "wandb"),
        )
    ]
    monkeypatch.setattr(distribution, "entry_points", lambda **_: scripts)
    distribution.distribution.cache_clear()
    yield scripts
    distribution.distribution.cache_clear()


def test_hints_name_it(installed: list[SimpleNamespace]) -> None:
    assert distribution.pip_install("slurm") == "pip install 'samecurve[slurm]'"


def test_version(
    installed: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["samecurve", "--version"])
    assert cli.command() == 0
    assert capsys.readouterr().out == "samecurve 1.2\n"


def test_a_checkout_that_is_not_installed(installed: list[SimpleNamespace]) -> None:
    del installed[:2]
    with pytest.raises(ConfigError, match=r"pip install -e \."):
        distribution.pip_install("slurm")


def test_the_commands_of_this_environment_have_a_distribution() -> None:
    ours = [c for c in importlib.metadata.entry_points(group="console_scripts") if is_ours(c)]
    assert distribution.distribution().version in {c.dist.version for c in ours if c.dist is not None}


def is_ours(command: EntryPoint) -> bool:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return scripts.get(command.name) == command.value


@pytest.mark.parametrize("command", [export.main, report.main])
def test_commands_answer_questions_about_themselves(
    command: Callable[[], NoReturn], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, answer in {"--help": "python -m runner.", "--version": "samecurve "}.items():
        monkeypatch.setattr("sys.argv", ["command", word])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(answer)
