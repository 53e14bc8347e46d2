"""The folder of a run and the facts written into it."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from runner.errors import ConfigError

PACKAGES = ("runner", "torch", "transformers", "tokenizers", "datasets", "hydra-core", "omegaconf", "numpy")


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
            raise ConfigError(f"run.output_dir: cannot make {folder}: {error.strerror}.") from error
        return folder
    raise AssertionError("unreachable")


def reopen_run_folder(folder: Path, step: int) -> Path:
    """The folder as it was at ``step``: rows that a killed run logged after its last checkpoint go."""
    path = folder / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [row for row in rows if row.endswith("\n") and json.loads(row)["step"] <= step]
    replace_text(path, "".join(kept))
    return folder


def replace_text(path: Path, text: str) -> None:
    """Killed at any instant, this leaves the old text or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    replace_text(folder / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return config


def read_facts(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return facts


def write_facts(folder: Path, **facts: Any) -> None:
    """Merges ``facts`` into run.json."""
    path = folder / "run.json"
    known = read_facts(folder) if path.exists() else {}
    replace_text(path, json.dumps(known | facts, indent=2) + "\n")


def environment_facts(command: Sequence[str]) -> dict[str, Any]:
    """Command line, versions and the commit of the source."""
    return {
        "command": list(command),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the checkout this code runs from; None where it is not one."""
    root = Path(__file__).resolve().parent.parent
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "--verify", "HEAD"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (FileNotFoundError, subprocess.SubprocessError):
        return None
    toplevel, commit = answer.stdout.split("\n")[:2]
    # An environment may lie inside somebody else's repository.
    return commit if Path(toplevel) == root else None
