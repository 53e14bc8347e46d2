"""tests/slow.txt names what is not in the quick part; a name that nothing has would hide a renamed test."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMES = (TESTS / "slow.txt").read_text().splitlines()


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_name_is_a_test() -> None:
    for name in NAMES:
        file, _, rest = name.partition("::")
        assert rest.partition("[")[0] in functions(TESTS.parent / file), name


def test_names_are_sorted_and_there_once() -> None:
    assert sorted(set(NAMES)) == NAMES
