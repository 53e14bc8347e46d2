"""How a run, or a job of a sweep, has ended."""

from typing import Literal

RunStatus = Literal["completed", "interrupted", "failed"]
"""``interrupted`` means stopped by a signal or by ``run.max_time``; such a run can be resumed."""
JobStatus = Literal["running", "completed", "invalid", "failed", "interrupted", "pruned"]
"""``invalid`` means that the job's configuration was refused before its run started."""
RENAMED: dict[str, str] = {"done": "completed", "refused": "invalid", "stopped": "interrupted"}
"""Names of statuses in files written before version 0.2, and the present names."""


def current_status(found: object) -> object:
    """Return the present name of a status read from a file."""
    return RENAMED.get(found, found) if isinstance(found, str) else found
