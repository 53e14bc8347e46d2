"""Early ends of unpromising runs: the pruner that a sweep leaves in its folder for its jobs."""

import json
import pkgutil
from pathlib import Path

from components.contracts.json_types import Config
from runner.launch.run_record import SweepPlace
from runner.training.stop import Pruner

FILE = "pruner.json"


def leave_pruner(sweep: Path, target: str, options: Config) -> None:
    """Write the file from which jobs build their pruner: ``target`` (module:class) with ``options``."""
    (sweep / FILE).write_text(json.dumps({"target": target, "options": dict(options)}) + "\n")


def leave_no_pruner(sweep: Path) -> None:
    (sweep / FILE).unlink(missing_ok=True)


def pruner_of(sweep: SweepPlace | None) -> Pruner | None:
    """Return the pruner of a job, given its ``sweep`` in run.json. None means that there is none."""
    path = None if sweep is None else Path(sweep.folder) / FILE
    if sweep is None or path is None or not path.exists():
        return None
    found = json.loads(path.read_text())
    pruner: Pruner = pkgutil.resolve_name(found["target"])(number=sweep.number, **found["options"])
    return pruner
