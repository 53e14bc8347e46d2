"""Budget of the quick part in processes and rank calls, which stand for its time: clocks are unreliable."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "RUNNER_TEST_SESSION"
"""Environment variable: a folder that all processes of one test session share."""
BUDGET: Mapping[str, int] = {"started": 45, "forked": 115, "rank_calls": 440}
"""Greatest number of newly started Python processes, of forked ones, and of function calls on ranks."""


def count(what: str) -> None:
    """Add one to the count ``what`` of the session that this process belongs to, if there is one."""
    if FOLDER in os.environ:
        with open(Path(os.environ[FOLDER], what), "ab") as file:
            file.write(b".")


def counts(folder: Path) -> dict[str, int]:
    """Return the counts of the session with this folder, summed over all its processes."""
    paths = {what: folder / what for what in BUDGET}
    return {what: path.stat().st_size if path.exists() else 0 for what, path in paths.items()}


def over_budget(found: Mapping[str, int]) -> list[str]:
    """Return one line for each count that is above its budget."""
    return [
        f"{what}: {found[what]} of {most} allowed; mark tests slow, or share what they start"
        for what, most in BUDGET.items()
        if found[what] > most
    ]


def count_starts() -> None:
    """Count every Python process that this process starts from now on."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and os.fspath(arguments[0] or arguments[1][0]) == sys.executable:
            count("started")

    sys.addaudithook(hook)
