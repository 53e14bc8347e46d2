"""Runs of tests on a copy of the checkout in which one file is changed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from benchmarks.mutants.coverage_map import listed_files
from benchmarks.mutants.operators import Mutant
from benchmarks.mutants.recorder import FILE, events

FLAGS = ("-x", "-q", "-n0", "-pno:cacheprovider", "-pno:randomly", "-pbenchmarks.mutants.recorder")
HANG_FACTOR, HANG_S = 10, 30.0
"""Multiple of a test's usual duration, and seconds added to it, after which the test counts as hanging."""
START_S = 10.0
"""Usual duration in seconds of the start of pytest, until its first test."""


class Outcome(NamedTuple):
    """Result of running tests on a mutant."""

    killer: str = ""
    """The test that killed the mutant, or '' if the mutant survived."""
    passed: int = 0
    """Number of tests that passed."""
    stopped: str = ""
    """Why pytest was stopped: "hang" if the killer did not end, "limit" if the time was up before all tests
    had run. "" means that it was not stopped."""


class Tree:
    """A copy of the files of a checkout in ``folder``, in which mutants are tried."""

    def __init__(self, root: Path, folder: Path, seconds: Mapping[str, float], limit_s: float) -> None:
        self.seconds, self.limit_s = seconds, limit_s
        self.path, self.scratch, self.record = folder / "main", folder / "tmp", folder / "record.jsonl"
        self.sound: set[str] = set()
        """Tests that pass without a mutant."""
        python_path = f"{self.path}{os.pathsep}{Path(__file__).parents[2]}"
        self.environ = os.environ | {"PYTHONPATH": python_path, FILE: str(self.record)}
        self.environ |= {"TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        for name in listed_files(root):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, self.path / name)
        if (root.parent / "shared").exists():
            (folder / "shared").symlink_to(root.parent / "shared")

    def write(self, path: str, text: bytes) -> None:
        """Replace a file and delete its .pyc, which Python reuses if size and mtime in seconds are equal."""
        (self.path / path).write_bytes(text)
        Path(cache_from_source(self.path / path)).unlink(missing_ok=True)

    def judge(self, mutant: Mutant, source: bytes, tests: Sequence[str]) -> Outcome:
        """Run the tests on a mutant.

        Only a test that passes without the mutant can kill it.
        """
        left = list(tests)
        while left:
            self.write(mutant.path, mutant.apply(source))
            try:
                record = self.run(left)
            finally:
                self.write(mutant.path, source)
            if not record.killer:
                return record
            if record.killer in self.sound or not self.run([record.killer]).killer:
                self.sound.add(record.killer)
                return record
            left = [test for test in left if not test.startswith(record.killer)]
        return Outcome()

    def run(self, tests: Sequence[str]) -> Outcome:
        """Run tests until one fails, and stop every process that they started."""
        self.record.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(exist_ok=True)  # a process that is being killed may still write to it
        ids = self.record.with_name("ids")
        ids.write_text("\n".join(tests) + "\n")
        command = [sys.executable, "-m", "pytest", *FLAGS, f"@{ids}"]
        with self.record.with_name("output.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self.path, env=self.environ, stdout=log, stderr=log, start_new_session=True
            )
        try:
            stopped = watch(process, self.record, self.seconds, self.limit_s)
        finally:
            stop(process)
        found, functions = events(self.record), list(dict.fromkeys(test.partition("[")[0] for test in tests))
        if process.returncode == pytest.ExitCode.USAGE_ERROR and not found and functions != tests:
            return self.run(functions)  # the mutant has renamed a case of a parametrized test
        return outcome_of(tests, process.returncode, stopped, found)


def outcome_of(tests: Sequence[str], code: int, stopped: str, found: Sequence[Mapping[str, str]]) -> Outcome:
    """Return the outcome, whose killer is the test that failed first.

    A failed collection or a process that dies counts as a failure. An exit code of 1 without a failed test
    does not: tests/conftest.py sets it if a session is over budget.
    """
    passed = sum(event["phase"] == "call" and event["outcome"] == "passed" for event in found)
    failed = [event["test"] for event in found if event["outcome"] == "failed"]
    done = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
    if not failed and (stopped == "limit" or code in done):
        return Outcome("", passed, stopped)
    started = [event["test"] for event in found if event["phase"] == "start"]
    name = next(iter([*failed, *reversed(started)]), "")
    similar = [test for test in tests if test.startswith(name) or name.startswith(test)]
    return Outcome(name if name in tests else [*similar, *tests][0], passed, stopped)


def watch(
    process: "subprocess.Popen[bytes]", record: Path, seconds: Mapping[str, float], limit_s: float
) -> str:
    """Wait for pytest; return "hang" or "limit" if it must be stopped, else "".

    The limit counts only at the start of a test: a test that has begun may end.
    """
    start = time.time()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
            return ""
        started = [(event["at"], event["test"]) for event in events(record) if event["phase"] == "start"]
        since, test = started[-1] if started else (start, "")
        if time.time() - since > HANG_FACTOR * seconds.get(test, START_S) + HANG_S:
            return "hang"
        if since > start + limit_s:
            return "limit"


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process group, and the children that have left it."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
