"""Checkpoint folders: their metadata, the marker of complete ones, and their removal."""

import contextlib
import json
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from components.atomic_write import sync_folder, write_atomic
from components.checkpoint.file_records import FileRecord
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.json_text import as_type, parse_json

MARKER = "complete"
"""Name of the file that marks a checkpoint as complete. It has one line: the checksum (CRC-32) of meta.json.

While meta.json is being replaced, it has a line for the old and one for the new meta.json."""
STEPS = "step_" + "[0-9]" * 8
"""Glob pattern of checkpoint folders. Copies that a user made next to them do not match."""
META = "meta.json"


@dataclass(frozen=True)
class CheckpointMeta:
    """Content of meta.json, which is written after the tensors."""

    state: Json
    """Counters of the run: ``runner.training.state.TrainState``."""
    identity: Json
    model_only: bool
    files: dict[str, FileRecord]
    """Files that all ranks have written, by name."""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def create_dir(folder: Path) -> None:
    """Create the folder of a checkpoint; several nodes may do so at once.

    Raises:
        FileNotFoundError: if the run folder does not exist any more. It is not created again, because it
            would lack the run's other files.
    """
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)


def commit(folder: Path, meta: CheckpointMeta) -> None:
    """Write meta.json and, once it is on disk, the marker.

    The files of all ranks must be on disk already. The first rank of every node calls this function, so that
    each local disk, or the shared one, has a marker.
    """
    text, mark = encode(meta)
    write_atomic(folder / META, text)
    write_atomic(folder / MARKER, mark)
    sync_folder(folder.parent)


def replace_meta(folder: Path, meta: CheckpointMeta) -> None:
    """Write another meta.json into a complete checkpoint, which stays complete if the process is killed.

    The first rank of every node calls this function.
    """
    text, mark = encode(meta)
    write_atomic(folder / MARKER, (folder / MARKER).read_bytes() + mark)  # valid with either meta.json
    write_atomic(folder / META, text)
    write_atomic(folder / MARKER, mark)


def encode(meta: CheckpointMeta) -> tuple[bytes, bytes]:
    """Return the content of meta.json and of the marker."""
    text = json.dumps(asdict(meta), indent=2).encode() + b"\n"
    return text, f"{zlib.crc32(text):08x}\n".encode()


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def read_meta(folder: Path) -> CheckpointMeta:
    """Read meta.json; raise ConfigError if it is missing or damaged."""
    try:
        text = (folder / META).read_bytes()
        if zlib.crc32(text) not in {int(line, 16) for line in (folder / MARKER).read_text().splitlines()}:
            raise ValueError("it is not the one that was marked")
        meta = as_type(CheckpointMeta, parse_json(text.decode()))
        if not isinstance(meta.state.get("step"), int):
            raise ValueError("state.step: should be a number of steps")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint.resume: {folder / META} is damaged, or of a later version ({error}); take another "
            "checkpoint."
        ) from error
    return meta


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted((f for f in checkpoints.glob(STEPS) if is_complete(f)), key=step_of)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the complete checkpoint with the best evaluation. None means that none is recorded.

    Every checkpoint records the step of the best evaluation so far. The newest of these records that names a
    complete checkpoint is used, because an older one may lack the evaluation of its own step: a stop
    postpones this evaluation until the run resumes.
    """
    complete = complete_checkpoints(checkpoints)
    for folder in reversed(complete):
        with contextlib.suppress(ConfigError):  # a damaged one is skipped
            step = read_meta(folder).state.get("best_step")
            if isinstance(step, int) and (best := step_folder(checkpoints, step)) in complete:
                return best
    return None


def prune(checkpoints: Path, keep_last: int, *, keep_best: bool) -> None:
    """Remove all complete checkpoints except the newest ``keep_last`` (0: keep all).

    Incomplete checkpoints that are older than the newest complete one are removed, too. With ``keep_best``,
    the checkpoint with the best evaluation is kept.
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
    """Remove a checkpoint, its marker first, so that it does not look complete if the process is killed.

    Several nodes may remove the same checkpoint of a shared filesystem at once.
    """
    while checkpoint.exists():
        with contextlib.suppress(FileNotFoundError):  # another node has removed a file
            unmark(checkpoint)
            sync_folder(checkpoint)
            shutil.rmtree(checkpoint)


def unmark(checkpoint: Path) -> None:
    (checkpoint / MARKER).unlink(missing_ok=True)
