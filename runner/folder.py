"""The folder of a run and the facts written into it."""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from runner.distribution import distribution
from runner.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
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


@contextmanager
def recording_end(folder: Path) -> Iterator[None]:
    """Writes into run.json how the run has ended, as ``ended``; none is there while it runs or was killed."""
    try:
        yield
    except BaseException as error:
        failed = isinstance(error, Exception)
        with suppress(OSError):  # the disk may be what it has failed of
            write_facts(folder, ended="failed" if failed else "stopped", error=str(error) if failed else None)
        raise
    write_facts(folder, ended="done" if read_facts(folder)["stopped"] is None else "stopped", error=None)


def environment_facts(command: Sequence[str]) -> dict[str, Any]:
    """Command line, versions and the commit of the source."""
    program = distribution()
    return {
        "command": list(command),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), program.name: program.version}
        | {name: version(name) for name in PACKAGES},
        "git_commit": git_commit(),
    }


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
