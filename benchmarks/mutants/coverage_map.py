"""The tests that cover a line, and their order, from coverage data with a context per test."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import coverage

from benchmarks.mutants.operators import Mutant
from benchmarks.mutants.recorder import FILE, durations

MEASURED = ("components", "runner")
SUFFIX = re.compile(r"\|(?:setup|run|teardown)$| \((?:setup|call|teardown)\)$")
"""Suffix that pytest-cov, or PYTEST_CURRENT_TEST, adds to the id of a test."""
SLOW_S = 2.0
"""Duration in seconds above which a test runs after all others."""
FEW_LINES = 50
"""Number of covered lines up to which tests count as equally specific."""


def test_of(context: str) -> str:
    """Return the id of the test of a context; '' for lines that ran while a module was imported."""
    return SUFFIX.sub("", context)


def names_module(file: Path, path: str) -> bool:
    """Return whether a file contains the dotted name of the module at ``path``."""
    module = re.escape(path.removesuffix(".py").replace("/", "."))
    return re.search(rf"\b{module}\b", file.read_text()) is not None


def contexts_of(by_line: Mapping[int, list[str]], lines: Iterable[int]) -> set[str]:
    return {context for line in lines for context in by_line.get(line, ())}


class CoverageMap:
    """The tests that cover each line, read from one database of coverage.py.

    ``seconds`` has the duration of each test that may be chosen. If it is empty, all tests may be chosen.
    """

    def __init__(self, database: Path, root: Path, seconds: Mapping[str, float]) -> None:
        self.root = root
        self.data = coverage.CoverageData(str(database))
        self.data.read()
        self.sizes: Counter[str] = Counter()
        """Number of lines that each test covers."""
        for file in self.data.measured_files():
            for contexts in self.data.contexts_by_lineno(file).values():
                self.sizes.update({test_of(context) for context in contexts} - {""})
        self.seconds = seconds or dict.fromkeys(self.sizes, 1.0)

    def tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that may kill a mutant, in the order in which to run them.

        If a fixture covers the line, every test of its file may kill the mutant, because coverage is recorded
        only for the first test that uses a shared fixture. If the line runs at import, every test that runs
        other code of the mutated file may kill the mutant. If there is no such test, every test that runs
        code of a file that names the module may kill it.
        """
        path = mutant.path
        by_line = self.data.contexts_by_lineno(str(self.root / path)) or self.data.contexts_by_lineno(path)
        first, last = mutant.statement
        found = set(by_line.get(mutant.line, ())) or contexts_of(by_line, range(first, last + 1))
        if found and (mutant.at_import or found == {""}):
            found = contexts_of(by_line, by_line) - {""} or self._of_importers(path)
        direct = {test_of(context) for context in found}
        shared = {context.partition("::")[0] for context in found if re.search(r"\Wsetup\)?$", context)}
        known = {test for test in self.seconds if test in direct or test.partition("::")[0] in shared}
        in_module = Counter(test_of(context) for contexts in by_line.values() for context in contexts)
        return self._ordered(known, direct, in_module)

    def _of_importers(self, path: str) -> set[str]:
        """Return the contexts of the measured files that contain the dotted name of the module ``path``."""
        found = set[str]()
        for file in self.data.measured_files():
            if names_module(self.root / file, path):
                by_line = self.data.contexts_by_lineno(file)
                found |= contexts_of(by_line, by_line)
        return found

    def _ordered(self, tests: set[str], direct: set[str], in_module: Counter[str]) -> list[str]:
        """Sort by file, then by duration; tests that do not run the line, or take long, are at the end.

        The first file is the one with the test that has the largest share of its covered lines in the module,
        because this test is probably written for the module. The tests of a file stay together, because each
        change of file ends the fixtures of a module.
        """
        files = {test: test.partition("::")[0] for test in tests}
        shares: defaultdict[str, float] = defaultdict(float)
        for test, file in files.items():
            share = in_module[test] / max(self.sizes[test], FEW_LINES)
            shares[file] = max(shares[file], share)

        def key(test: str) -> tuple[bool, bool, float, str, float, str]:
            file, seconds = files[test], self.seconds[test]
            return test not in direct, seconds > SLOW_S, -shares[file], file, seconds, test

        return sorted(tests, key=key)


def listed_files(root: Path) -> list[str]:
    """Return the existing files of the checkout that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in names.split("\0") if (root / name).is_file()})


def digest(root: Path) -> str:
    """Return a checksum of all files that determine which test covers which line."""
    checksum = hashlib.sha256()
    for name in listed_files(root):
        if name.endswith((".py", ".yaml", ".toml")) and not name.startswith("benchmarks/"):
            checksum.update(f"{name}\0".encode() + (root / name).read_bytes())
    return checksum.hexdigest()


def map_of(root: Path, database: Path | None) -> CoverageMap:
    """Read the given database and the ``durations.jsonl`` next to it, or else the cached ones.

    If the cached files are not up to date, the quick tests are measured first.
    """
    cached = root / ".cache" / "mutants" / "coverage"
    record, stamp = (database or cached).with_name("durations.jsonl"), cached.with_name("digest")
    now = digest(root)
    if database is None and not (stamp.exists() and stamp.read_text() == now):
        measure(root, cached, record)
        stamp.write_text(now)
    return CoverageMap(database or cached, root, durations(record))


def measure(root: Path, database: Path, record: Path) -> None:
    """Run the quick tests once and write what they cover and how long they take."""
    print("running the quick tests once to see what they cover: about 15 minutes", flush=True)
    database.parent.mkdir(parents=True, exist_ok=True)
    for old in database.parent.iterdir():
        old.unlink()
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.mutants.recorder", "--cov-context=test"]
    command += ["--cov-report=", *(f"--cov={package}" for package in MEASURED)]
    environ = os.environ | {"COVERAGE_FILE": str(database), FILE: str(record)}
    code = subprocess.run(command, cwd=root, env=environ, check=False).returncode
    if code > 1:
        sys.exit(f"pytest ended with exit code {code}")
    if code == 1:
        print("pytest failed without any mutant; the tests that failed are left out")
