"""tests/slow.txt names the tests outside of the quick part; a stale name would hide a renamed test."""

import ast
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMES = (TESTS / "slow.txt").read_text().splitlines()


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_name_is_a_test() -> None:
    for name in NAMES:
        file, _, rest = name.partition("::")
        assert rest.partition("[")[0] in functions(TESTS.parent / file), name


def test_every_row_is_a_test() -> None:
    """Every row names a collected test; the test takes as long as importing all tests."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "--collect-only"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    shown = subprocess.check_output(command, cwd=TESTS.parent, env=environ, text=True)
    rows = set(shown.splitlines())
    assert not [name for name in NAMES if name not in rows | {row.partition("[")[0] for row in rows}]


def test_names_are_sorted_and_there_once() -> None:
    assert sorted(set(NAMES)) == NAMES
