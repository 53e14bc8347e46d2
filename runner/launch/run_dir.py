"""The folder of a run, and the source it ran from."""

import json
import platform
import subprocess
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path

import yaml

from components.atomic_write import write_atomic
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from runner.config.renamed_keys import upgraded
from runner.distribution import distribution

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "hydra-core", "omegaconf", "numpy")


def create_run_folder(output_dir: str, name: str) -> Path:
    """``output_dir/name/<stamp>``; two runs never share one, however close they start.

    Raises:
        ConfigError: the folder cannot be made.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in count():
        folder = Path(output_dir, name, f"{stamp}__{suffix}" if suffix else stamp).absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if folder.parent.is_dir():
                continue
            raise ConfigError(f"run.output_dir: {folder.parent} is a file; name a folder.") from None
        except OSError as error:
            raise ConfigError(
                f"run.output_dir: cannot make {folder}: {error.strerror}; name another folder."
            ) from error
        return folder
    raise AssertionError("unreachable")


def reopen_run_folder(folder: Path, step: int) -> Path:
    """The folder as it was at ``step``: rows that a killed run logged after its last checkpoint go."""
    path = folder / "metrics.jsonl"
    if not path.exists():  # another logger was chosen
        return folder
    rows = path.read_text().splitlines(keepends=True)
    kept = [row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= step]
    write_atomic(path, "".join(kept))
    return folder


def write_config(folder: Path, config: Config) -> None:
    write_atomic(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def read_run_config(folder: Path) -> Json:
    """Return the composed config of the run in ``folder``, with the keys of today."""
    return upgraded(yaml.safe_load((folder / "config.yaml").read_text()))


def versions() -> dict[str, str]:
    """Return the versions of Python, of this program and of the packages that a run depends on."""
    own = distribution()
    found = {"python": platform.python_version(), own.name: own.version}
    return found | {name: version(name) for name in PACKAGES}


def write_code_diff(folder: Path) -> None:
    """What the checkout this code runs from has beyond its commit, as ``code.diff``; nothing, no file."""
    diff = git("diff", "HEAD") if git_commit() is not None else None
    if diff:
        (folder / "code.diff").write_text(diff)


def git_commit() -> str | None:
    """The commit of the checkout this code runs from; None where it is not one."""
    answer = git("rev-parse", "--show-toplevel", "--verify", "HEAD")
    if answer is None:
        return None
    toplevel, commit = answer.split("\n")[:2]
    # An environment may lie inside somebody else's repository.
    return commit if Path(toplevel) == ROOT else None


def git(*arguments: str) -> str | None:
    """What git says of the folder of this code; None where it, or git, knows nothing."""
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (FileNotFoundError, subprocess.SubprocessError):
        return None
    return answer.stdout
