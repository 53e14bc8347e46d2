"""The budget of the quick tests: the counts and the report of an excess."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import budget
from tests.ranks import Ranks


def test_what_is_above_is_told() -> None:
    assert budget.over_budget(budget.BUDGET) == []
    (line,) = budget.over_budget({**budget.BUDGET, "forked": budget.BUDGET["forked"] + 1})
    assert line.startswith(f"forked: {budget.BUDGET['forked'] + 1} of {budget.BUDGET['forked']} allowed")


def answer() -> int:
    return 42


def test_processes_and_calls_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is on in this process, because conftest.py turns it on at the start."""
    ranks = Ranks(1)
    ranks.kill()
    monkeypatch.setenv(budget.FOLDER, str(tmp_path))
    for _ in range(2):
        assert ranks.run(answer) == [42]
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    assert budget.counts(tmp_path) == {"started": 1, "forked": 1, "rank_calls": 2}
