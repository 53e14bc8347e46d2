"""The budget of the quick tests: the counts and the report of an excess."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import budget
from tests.ranks import Ranks


def test_what_is_above_is_told() -> None:
    found = {what: Counter({"one": 2, "another": most - 2}) for what, most in budget.BUDGET.items()}
    assert budget.over_budget(found) == []
    found["forked"]["one"] += 1
    (line,) = budget.over_budget(found)
    most = budget.BUDGET["forked"]
    assert line.startswith(f"forked: {most + 1} of {most} allowed")
    assert line.endswith(f"Most by: another ({most - 2}), one (3)")


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
    subprocess.run([sys.executable, "-S", "-c", "# cdll.LoadLibrary('x.so')"], check=True)
    name = f"{Path(__file__).relative_to(Path.cwd())}::test_processes_and_calls_are_counted"
    expected = {"started": {name: 1}, "forked": {name: 1}, "rank_calls": {name: 2}}
    assert budget.counts(tmp_path) == expected
