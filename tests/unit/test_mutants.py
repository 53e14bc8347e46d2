"""Mutation testing: the changes, the tests that run on each change, and their verdicts."""

import json
import signal
import subprocess
import time
from pathlib import Path

import coverage
import pytest

from benchmarks.mutants.__main__ import described, drawn_from, judge_all
from benchmarks.mutants.coverage_map import CoverageMap, map_of
from benchmarks.mutants.coverage_map import test_of as id_of
from benchmarks.mutants.operators import Finder, Mutant
from benchmarks.mutants.trial import Tree, outcome_of, stop, watch

ROOT = Path(__file__).parents[2]


def mutants_of(source: str, path: str = "a.py") -> list[Mutant]:
    found = list(Finder(path, source.encode()).mutants())
    return [mutant for mutant in found if mutant.is_valid(source.encode())]


def mutated(source: str) -> set[str]:
    return {mutant.apply(source.encode()).decode() for mutant in mutants_of(source)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a + b", "x = a - b"),
        ("x = (a)  -  (b)", "x = (a)  +  (b)"),
        ("x -= b", "x += b"),
        ("x = a * b", "x = a / b"),
        ("x = a // b", "x = a * b"),
        ("x = a < b <= c", "x = a <= b <= c"),
        ("x = a < b <= c", "x = a < b < c"),
        ("x = a > b", "x = a >= b"),
        ("x = a == b", "x = a != b"),
        ("x = (a ==  # is it == ?\n  b)", "x = (a !=  # is it == ?\n  b)"),
        ("x = (a  # + or -\n  + b)", "x = (a  # + or -\n  - b)"),
        ("x = a and b and c", "x = a and b or c"),
        ("x = a or b", "x = a and b"),
        ("x = a is b", "x = a is not b"),
        ("x = a is  not b", "x = a is b"),
        ("x = a in b", "x = a not in b"),
        ("x = a not in b", "x = a in b"),
        ("x = f(not a)", "x = f( a)"),
        ("x = min(a, b)", "x = max(a, b)"),
        ("x = a.max()", "x = a.min()"),
        ("x = 7", "x = 8"),
        ("x = 0.5", "x = 1.5"),
        ("x = -1", "x = -2"),
        ("x = True", "x = False"),
        ("x = 'é' + a  # ü", "x = 'éx' + a  # ü"),
        ("x = b'a'", "x = b'ax'"),
        ("ü = f(a)\nx: int = g()", "ü = f(a)\npass"),
        ("if a: f(); g()", "if a: pass; g()"),
        ("def f():\n    return [\n        x\n    ]\n", "def f():\n    return None\n"),
        ("def f():\n    raise E(a)\n", "def f():\n    pass\n"),
        ("f(a, (b), *c)", "f(b, (a), *c)"),
        ("if a or b:\r\n    f()\r\n", "if not (a or b):\r\n    f()\r\n"),
        ("if a:\n    f()\nelif b:\n    g()", "if a:\n    f()\nelif not (b):\n    g()"),
        ("x = a if b else c", "x = a if not (b) else c"),
    ],
)
def test_one_change(before: str, after: str) -> None:
    assert after in mutated(before)


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring."""',
        'def f(x: Literal["a", 3]) -> dict["A", 1]:\n    "Docstring."',
        'class A:\n    x: "int"\n    """Of an attribute."""',
        "import a.b\nfrom c import d as e",
        "assert a < 1, 'message'",
        "@a(1)\ndef f(): ...",
        "__all__ = ['a', 'b']\n__all__ += ['c']",
        "if TYPE_CHECKING:\n    x = 1",
        "def f(x=a(non_blocking=True)): ...",
    ],
)
def test_nothing_to_change(source: str) -> None:
    assert mutated(source) == set()


def test_messages_stay() -> None:
    source = "def f():\n    if a:\n        raise ConfigError('text' + str(1), f'{b + 1} in')\n"
    assert {mutant.line for mutant in mutants_of(source)} == {2, 3}
    assert mutated(source) == {source.replace("a:", "not (a):"), "def f():\n    if a:\n        pass\n"}
    assert mutated("log.warning('text %s', a)") == {"pass", "log.warning(a, 'text %s')"}
    assert mutated("x = ValueError('text')") == {"pass"}
    assert mutated("x = Literal['a'] | cast('A', a)") == {"pass", "x = Literal['a'] | cast(a, 'A')"}


def test_swapping_does_nothing_to_some_calls() -> None:
    assert mutated("f(min(a, b))") == {"pass", "f(max(a, b))"}
    assert mutated("f(a, a)") == mutated("f(*a, b)") == mutated("f(a, k=b)") == {"pass"}


def test_what_only_a_gpu_runs_is_not_drawn() -> None:
    source = "if device.type == 'cuda':\n    f()\nelse:\n    g()\n"
    assert {mutant.line for mutant in mutants_of(source)} == {1, 4}


def test_excluded_lines_are_not_drawn(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "a.py").write_text("def f(x):\n    if x:  # pragma: no cover\n        x = 1\n    return x\n")
    assert {mutant.line for mutant in drawn_from(tmp_path, ["a.py"], 9, 0)} == {4}


def test_the_seed_decides() -> None:
    first, again, others = (list(drawn_from(ROOT, ["components/losses"], 8, seed)) for seed in (3, 3, 4))
    assert first == again != others
    assert len({(mutant.path, mutant.line) for mutant in first}) == 8


def test_where_and_when_a_line_runs() -> None:
    source = "x = 1\ndef f(a=2):\n    return (a,\n        g)\ny = lambda: 3\n"
    found = {(mutant.line, mutant.at_import, mutant.statement) for mutant in mutants_of(source)}
    assert found == {
        (1, True, (1, 1)), (2, True, (2, 2)), (3, False, (3, 4)), (5, True, (5, 5)), (5, False, (5, 5))
    }  # fmt: skip


@pytest.mark.parametrize("suffix", ["", "|setup", "|run", "|teardown", " (setup)", " (call)", " (teardown)"])
def test_ids_of_contexts(suffix: str) -> None:
    for test in ("tests/a.py::test_b[t|run x]", "tests/a.py::A::test_b[(call)]", "tests/a.py::test_setup"):
        assert id_of(test + suffix) == test


def map_with(
    folder: Path, seconds: dict[str, float], lines: dict[str, list[int]], file: str = "a.py"
) -> CoverageMap:
    """Add lines to a coverage map by hand, and return the map."""
    data = coverage.CoverageData(str(folder / "map"))
    if Path(data.data_filename()).exists():
        data.read()  # otherwise write() would erase its lines
    for context, numbers in lines.items():
        data.set_context(context)
        data.add_lines({str(folder / file): numbers})
    data.write()
    (folder / file).write_text("from a import X")
    return CoverageMap(folder / "map", folder, seconds)


def mutant_at(line: int, *, at_import: bool = False) -> Mutant:
    return Mutant("a.py", line, ("deleted", 0, 0, "pass"), (line, line + 1), at_import)


def test_the_order_of_tests(tmp_path: Path) -> None:
    lines = {
        "t/wide.py::a|run": [3, 4, 5, 6, 7],
        "t/wide.py::slow|run": [3],
        "t/narrow.py::a|run": [3, 4],
        "t/narrow.py::b (call)": [3, 4, 5],
        "t/narrow.py::slow|run": [3, 4],
        "t/shares.py::a|setup": [8],
        "t/failing.py::a|run": [3, 8],
        "": [1, 2],
    }
    seconds = dict.fromkeys(["t/wide.py::a", "t/shares.py::a", "t/shares.py::other"], 0.5)
    seconds |= {
        "t/narrow.py::a": 1.0,
        "t/narrow.py::b": 0.1,
        "t/narrow.py::slow": 9.0,
        "t/wide.py::slow": 3.0,
    }
    known = map_with(tmp_path, seconds, lines)
    narrow = ["t/narrow.py::b", "t/narrow.py::a"]
    assert known.tests(mutant_at(6)) == ["t/wide.py::a"]
    assert known.tests(mutant_at(4)) == ["t/wide.py::a", *narrow, "t/narrow.py::slow"]
    slow = ["t/wide.py::slow", "t/narrow.py::slow"]
    assert known.tests(mutant_at(3)) == ["t/wide.py::a", *narrow, *slow]
    assert known.tests(mutant_at(8)) == ["t/shares.py::a", "t/shares.py::other"]
    assert known.tests(mutant_at(9)) == []
    assert set(known.tests(mutant_at(1))) == set(known.tests(mutant_at(5, at_import=True))) == {*seconds}
    known = map_with(tmp_path, seconds, {"t/wide.py::a|run": [*range(1, 101)]}, file="b.py")
    assert known.tests(mutant_at(3)) == [*narrow, "t/wide.py::a", *reversed(slow)]


def test_a_file_without_functions_is_tested_where_it_is_imported(tmp_path: Path) -> None:
    map_with(tmp_path, {}, {"": [1]})
    known = map_with(tmp_path, {}, {"": [1], "b.py::a|run": [2]}, file="b.py")
    assert known.tests(mutant_at(1, at_import=True)) == ["b.py::a"]


@pytest.mark.parametrize(("begun", "answer"), [(-1000.0, "hang"), (1000.0, "limit")])
def test_what_does_not_end_is_stopped(tmp_path: Path, begun: float, answer: str) -> None:
    """A test that began long ago is a hang; if one began after the time limit, the limit is exceeded."""
    record, event = tmp_path / "record", {"test": "a", "phase": "start", "at": time.time() + begun}
    record.write_text(json.dumps(event) + "\n")
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    assert watch(process, record, {"a": 1.0}, 90.0) == answer
    stop(process)
    assert process.returncode == -signal.SIGKILL


def test_what_a_run_says() -> None:
    tests = ["t/a.py::b", "t/a.py::c[1]", "t/d.py::e"]
    started = {"test": "t/a.py::c[1]", "phase": "start", "outcome": ""}
    failed = {"test": "t/d.py", "phase": "collect", "outcome": "failed"}
    assert outcome_of(tests, 0, "", [started]) == ("", 0, "")
    assert outcome_of(tests, -9, "limit", [started]) == ("", 0, "limit")
    assert outcome_of(tests, -9, "hang", [started]) == ("t/a.py::c[1]", 0, "hang")
    assert outcome_of(tests, -11, "", []) == ("t/a.py::b", 0, "")
    assert outcome_of(tests, 1, "", [started]) == ("", 0, "")
    assert outcome_of(tests, 4, "", [started, failed]).killer == "t/d.py::e"


MODULE = """LIMIT = 3


def clip(x):
    if x > LIMIT:
        return LIMIT
    return x
"""
TESTS = """import pytest
from components.tiny import clip


def test_below():
    assert clip(1) == 1


@pytest.mark.parametrize("x", [4, 5])
def test_above(x):
    assert clip(x) == 3
"""


def test_from_the_map_to_the_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of a small project, whose package has the name of ours, import the mutated copy."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing all plugins takes a second
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin -p pytest_cov.plugin")
    root = tmp_path / "project"
    for name, text in {
        "components/__init__.py": "",
        "components/tiny.py": MODULE,
        "tests/test_tiny.py": TESTS,
        "pyproject.toml": "",
        ".gitignore": ".cache",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    covered = map_of(root, None)
    source = MODULE.encode()
    killed, survives = (
        next(mutant for mutant in mutants_of(MODULE, "components/tiny.py") if mutant.change[0] == operator)
        for operator in ("if negated", "> to >=")
    )
    tree = Tree(root, tmp_path / "copy", covered.seconds, 60)
    found = judge_all({killed: source, survives: source}, covered, [tree])
    survivor, victim = sorted(map(described, found))
    assert survivor == "components/tiny.py:5 > to >=: survived after 3 of 3 tests"
    assert victim.startswith("components/tiny.py:5 if negated: killed by tests/test_tiny.py::test_")
    assert (tree.path / "components/tiny.py").read_bytes() == source
    assert (root / ".cache/mutants/digest").exists()
