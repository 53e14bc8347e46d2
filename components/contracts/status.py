"""Statuses of runs and of the jobs of a sweep."""

from typing import Literal

RunStatus = Literal["completed", "interrupted", "failed"]
"""Status of a run that has ended. ``interrupted`` means that a signal or ``run.max_time`` stopped the run,
which can be resumed."""
JobStatus = Literal["running", "completed", "invalid", "failed", "interrupted", "pruned"]
"""Status of a job. ``invalid`` means that its configuration was refused before its run started."""
RENAMED: dict[str, str] = {"done": "completed", "refused": "invalid", "stopped": "interrupted"}
"""Name of a status in files written before version 0.2 -> its current name."""


def current_status(found: object) -> object:
    """Return the current name of a status that was read from a file."""
    return RENAMED.get(found, found) if isinstance(found, str) else found
