"""Run folders: their creation, their config, and the version of the source code."""

import platform
import subprocess
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path

import yaml

from components.atomic_write import write_atomic
from components.checkpoint import is_run_folder, run_order
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.json_text import one_line, parse_json
from components.yaml_text import parse_yaml
from runner.distribution import distribution
from runner.records.renamed_keys import upgraded

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "hydra-core", "omegaconf", "numpy")


def create_run_folder(output_dir: str, name: str) -> Path:
    """Create ``output_dir/name/<stamp>`` and return its absolute path.

    Runs that start at the same time get different folders. In ``run_order`` the new folder follows all
    others, even if the clock was set back after the previous one was created.

    Raises:
        ConfigError: if the folder cannot be created.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    stamped = [run_order(path) for path in Path(output_dir, name).glob("*") if is_run_folder(path)]
    latest, number = max(stamped, default=("", 0))
    stamp, first = (latest, number + 1) if latest >= stamp else (stamp, 0)
    for suffix in count(first):
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
    """Remove rows and completions after ``step``, at which the run resumes; return the folder.

    A killed run may have logged steps after its last checkpoint.

    Raises:
        ConfigError: if metrics.jsonl is damaged, or a file has the name of a folder of the run.
    """
    for name in ("checkpoints", "export", "logs"):
        if (folder / name).is_file():
            raise ConfigError(f"{folder / name}: is a file, and the run needs a folder there; move it.")
    for path in folder.glob("completions/**/step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdigit() and (not step or int(number) > step):
            path.unlink()
    path = folder / "metrics.jsonl"
    if not path.exists():  # another logger was chosen
        return folder
    try:
        rows = path.read_text().splitlines(keepends=True)
        # A run that begins again evaluates its initial weights again, too.
        kept = [row for row in rows if step and row.endswith("\n") and parse_json(row)["step"] <= step]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: is damaged ({one_line(error)}); restore it, or remove it.") from error
    write_atomic(path, "".join(kept))
    return folder


MODEL_PATHS = ("model.path", "model.tokenizer", "adapter.path", "stage.reference_path")
"""Keys that may be paths of local models, which the config of a run has as absolute paths."""


def write_config(folder: Path, config: Config) -> None:
    write_atomic(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def read_run_config(folder: Path) -> Json:
    """Return the composed config of the run in ``folder``, with the current key names.

    Raises:
        ConfigError: if config.yaml cannot be read, or is not the configuration of a run.
    """
    path = folder / "config.yaml"
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {one_line(error)}; restore it.") from error
    found = upgraded(config) if isinstance(config, dict) else {}
    for group in ("run", "model", "adapter", "checkpoint"):
        if not isinstance(found.get(group), dict):
            raise ConfigError(f"{path}: has no {group}, as the configuration of a run has; restore it.")
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python, of this program and of the packages that a run depends on."""
    own = distribution()
    found = {"python": platform.python_version(), own.name: own.version}
    return found | {name: version(name) for name in PACKAGES}


def write_code_diff(folder: Path) -> None:
    """Write the uncommitted changes of this code's checkout to ``code.diff``; remove it if there are none."""
    plain = ("--no-ext-diff", "--no-color", "--binary")  # whatever the user's configuration of git says
    diff = git("diff", *plain, "HEAD") if git_commit() is not None else None
    if diff:
        write_atomic(folder / "code.diff", diff)
    else:  # an earlier start of the run may have written one
        (folder / "code.diff").unlink(missing_ok=True)


def git_commit() -> str | None:
    """Return the commit of this code's checkout. None means that the code is not in a checkout of its own."""
    answer = git("rev-parse", "--show-toplevel", "--verify", "HEAD")
    if answer is None:
        return None
    toplevel, commit = answer.split("\n")[:2]
    # An environment may lie inside another repository.
    return commit if Path(toplevel) == ROOT else None


def git(*arguments: str) -> str | None:
    """Return git's output in the folder of this code. None means that git failed or is not installed."""
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
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout
