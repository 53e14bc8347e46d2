"""The file in a sweep folder from which each job builds its pruner, which ends unpromising runs early."""

import json
import pkgutil
from dataclasses import asdict, dataclass
from pathlib import Path

from components.atomic_write import write_atomic
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.json_text import as_type, one_line, read_json
from runner.records.run_record import SweepPlace
from runner.training.stop import Pruner

FILE = "pruner.json"


@dataclass(frozen=True)
class PrunerFile:
    """The content of the file: the class, as ``module:class``, and its arguments other than ``number``."""

    target: str
    options: Json


def leave_pruner(sweep: Path, target: str, options: Config) -> None:
    """Write the file from which jobs build their pruner: ``target`` (module:class) with ``options``."""
    write_atomic(sweep / FILE, json.dumps(asdict(PrunerFile(target, dict(options)))) + "\n")


def leave_no_pruner(sweep: Path) -> None:
    (sweep / FILE).unlink(missing_ok=True)


def pruner_of(sweep: SweepPlace | None) -> Pruner | None:
    """Return the pruner of a job, given the field ``sweep`` of its run.json. None means that there is none.

    Raises:
        ConfigError: if the file is damaged, or the pruner cannot be built from it.
    """
    path = None if sweep is None else Path(sweep.folder) / FILE
    if sweep is None or path is None or not path.exists():
        return None
    try:
        found = as_type(PrunerFile, read_json(path))
        return pkgutil.resolve_name(found.target)(number=sweep.number, **found.options)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise ConfigError(f"{path}: is damaged ({one_line(error)}); start the sweep again.") from error
