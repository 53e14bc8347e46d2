"""Budget of the quick part in processes and rank calls, which stand for its time: clocks are unreliable."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "RUNNER_TEST_SESSION"
"""Environment variable: a folder that all processes of one test session share."""
BUDGET: Mapping[str, int] = {"started": 45, "forked": 115, "rank_calls": 440}
"""Greatest number of newly started Python processes, of forked ones, and of function calls on ranks."""

PROBE = "LoadLibrary"
"""Word in the code of the processes by which torch's compiler tries the instruction sets of the CPU. Their
number depends on the CPU and on the compiler's cache, so they are not counted."""


def count(what: str) -> None:
    """Add the running test to the list ``what`` of the session that this process belongs to, if any."""
    if FOLDER in os.environ:
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").partition(" (")[0]
        with open(Path(os.environ[FOLDER], what), "a") as file:
            file.write(f"{test}\n")


def counts(folder: Path) -> dict[str, Counter[str]]:
    """Return the counts by test of the session with this folder, over all its processes."""
    paths = {what: folder / what for what in BUDGET}
    return {
        what: Counter(path.read_text().splitlines() if path.exists() else ()) for what, path in paths.items()
    }


def over_budget(found: Mapping[str, Counter[str]]) -> list[str]:
    """Return one line for each count that is above its budget, with the tests that have most of it."""
    return [
        f"{what}: {found[what].total()} of {most} allowed; mark tests slow, or share what they start. "
        "Most by: " + ", ".join(f"{test} ({number})" for test, number in found[what].most_common(5))
        for what, most in BUDGET.items()
        if found[what].total() > most
    ]


def count_starts() -> None:
    """Count every Python process that this process starts from now on."""
    start = subprocess.Popen.__init__

    def counting(process: "subprocess.Popen[Any]", args: Any, *more: Any, **options: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else [str(args)]
        if words[0] == sys.executable and not any(PROBE in word for word in words):
            count("started")
        start(process, args, *more, **options)

    subprocess.Popen.__init__ = counting  # type: ignore[method-assign]
