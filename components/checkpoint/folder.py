"""Checkpoint folders: what marks a whole one, what it says of itself, and how one goes."""

import contextlib
import json
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from components.atomic_write import sync_folder, write_atomic
from components.checkpoint.files import FileRecord
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json

MARKER = "complete"
"""Holds the checksum of meta.json: it vouches for no other."""
STEPS = "step_" + "[0-9]" * 8
"""Folders of checkpoints: not what a user has copied beside them."""
META = "meta.json"


@dataclass(frozen=True)
class CheckpointMeta:
    """meta.json, written after the tensors."""

    state: Json
    """Counters of the run: ``runner.training.state.TrainState``."""
    identity: Json
    model_only: bool
    files: dict[str, FileRecord]
    """All that ranks have written, by name."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def create_dir(folder: Path) -> None:
    """An empty folder, whatever was there: left behind by a run that was killed here, or whole."""
    remove(folder)
    folder.mkdir(parents=True, exist_ok=True)


def commit(folder: Path, meta: CheckpointMeta) -> None:
    """Writes meta.json and then, when it is on disk, the marker; every rank's files are on disk before.

    On the first rank of every node: each marks its own filesystem, or all of them the one that they share.
    """
    text = json.dumps(asdict(meta), indent=2).encode() + b"\n"
    write_atomic(folder / META, text)
    write_atomic(folder / MARKER, f"{zlib.crc32(text):08x}\n".encode())
    sync_folder(folder.parent)


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def read_meta(folder: Path) -> CheckpointMeta:
    """
    Raises:
        ConfigError: meta.json is missing or damaged.
    """
    try:
        text = (folder / META).read_bytes()
        if int((folder / MARKER).read_text(), 16) != zlib.crc32(text):
            raise ValueError("it is not the one that was marked")
        content = json.loads(text)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        return CheckpointMeta(**content | {"files": files})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"checkpoint.resume: {folder / META} is damaged; take another checkpoint."
        ) from error


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Whole ones, oldest first."""
    return sorted((f for f in checkpoints.glob(STEPS) if is_complete(f)), key=step_of)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The whole one that had the best evaluation when it was written: the newest that says so."""
    for folder in reversed(complete_checkpoints(checkpoints)):
        with contextlib.suppress(ConfigError):  # a damaged one is nobody's best
            if read_meta(folder).state.get("best_step") == step_of(folder):
                return folder
    return None


def prune(checkpoints: Path, keep_last: int, *, keep_best: bool) -> None:
    """Removes torn ones behind the newest whole one, and whole ones but the newest ``keep_last`` (0: all).

    With ``keep_best`` the best one stays too.
    """
    complete = complete_checkpoints(checkpoints)
    if not complete:
        return
    best = best_checkpoint(checkpoints) if keep_best else None
    torn = [f for f in checkpoints.glob(STEPS) if not is_complete(f) and f < complete[-1]]
    for old in torn + (complete[:-keep_last] if keep_last else []):
        if old != best:
            remove(old)


def remove(checkpoint: Path) -> None:
    """The marker goes first: killed half-way, this must not leave what looks like a whole checkpoint."""
    if not checkpoint.exists():
        return
    unmark(checkpoint)
    with contextlib.suppress(FileNotFoundError):  # another node, on a filesystem that they share
        sync_folder(checkpoint)
        shutil.rmtree(checkpoint)


def unmark(checkpoint: Path) -> None:
    (checkpoint / MARKER).unlink(missing_ok=True)


def discard(checkpoint: Path) -> None:
    """Of a save that failed, as much as the disk lets go of; what stays has no marker."""
    with contextlib.suppress(OSError):
        remove(checkpoint)
