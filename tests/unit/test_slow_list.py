"""tests/slow.txt names the tests outside of the quick part; a stale name would hide a renamed test."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NAMES = (TESTS / "slow.txt").read_text().splitlines()


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_name_is_a_test() -> None:
    for name in NAMES:
        file, _, rest = name.partition("::")
        assert rest.partition("[")[0] in functions(TESTS.parent / file), name


def test_every_row_is_a_test(request: pytest.FixtureRequest, collected: set[str]) -> None:
    """Every row names a test that this session has collected."""
    if [Path(word).resolve() for word in request.config.args] != [TESTS]:
        pytest.skip("the session does not collect all tests")
    known = collected | {name.partition("[")[0] for name in collected}
    assert not [name for name in NAMES if name not in known]


def test_names_are_sorted_and_there_once() -> None:
    assert sorted(set(NAMES)) == NAMES
