"""A pytest plugin that appends start, outcome and duration of each test to a file of JSON lines.

Usage: ``MUTANTS_RECORD=FILE pytest -p benchmarks.mutants.recorder``.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

FILE = "MUTANTS_RECORD"
"""Environment variable with the path of the file to which events are appended."""


def pytest_configure(config: pytest.Config) -> None:
    """Disable this plugin in the workers of pytest-xdist, whose controller records their reports."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.unregister(sys.modules[__name__])


def write(test: str, phase: str, record: str = "", seconds: float = 0.0) -> None:
    event = {"test": test, "phase": phase, "outcome": record, "seconds": seconds, "at": time.time()}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(event) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    write(nodeid, "start")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    write(report.nodeid, report.when or "", report.outcome, report.duration)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        write(report.nodeid, "collect", report.outcome)


def events(file: Path) -> list[dict[str, Any]]:
    """Read the events in the complete lines of a file to which lines may still be appended."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def durations(file: Path) -> dict[str, float]:
    """Return the seconds of every test that did not fail, with its setup and teardown."""
    seconds, found = Counter[str](), events(file)
    failed = {event["test"] for event in found if event["outcome"] == "failed"}
    for event in found:
        seconds[event["test"]] += event["seconds"]
    return {test: total for test, total in seconds.items() if test not in failed}
