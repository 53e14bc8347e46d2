"""Checkpoint folders: what marks a whole one, where the newest is, and which run may continue from it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.errors import ConfigError

MARKER = "complete"
META = "meta.json"


@dataclass(frozen=True)
class RunIdentity:
    """What a run and its continuation have in common."""

    model: str
    """Hash of parameter names and shapes."""
    data: str
    """Hash of the data and of everything that shapes its plan, but for the batch size."""
    optimizer: str
    """Its kind: another one has other moments."""
    reference: str | None
    """Where the weights of a reference model come from; None: there is none."""
    seed: int
    global_batch_size: int
    trained: str | None = None
    """Where a part of the model is trained, or an adapter: hash of its parameters' names and shapes."""
    base: str | None = None
    """Then, hash of what the rest is made of, which is in no checkpoint."""


REMEDIES = {
    "model": "model: the checkpoint is of another model; use the one it was written with",
    "optimizer": "set optimizer={theirs}",
    "reference": "the reference model was {theirs}; set model.init, model.path, model.revision "
    "and stage.reference_path to it",
    "trained": "adapter, model.freeze: other parameters were trained; use those of its run",
    "base": "model: the frozen weights are not those of its run (model.path has changed); use the same",
    "seed": "set run.seed={theirs}",
    "global_batch_size": "set run.global_batch_size={theirs}",
    "data": "data: the samples, the tokenizer or an option that shapes batches differ; use those of its run",
}
"""In the order of asking: a seed changes the plan of the data too."""


@dataclass(frozen=True)
class CheckpointMeta:
    """meta.json, written after the tensors."""

    state: dict[str, Any]
    """Counters of the run: ``runner.state.TrainState``."""
    identity: dict[str, Any]
    model_only: bool


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def commit(folder: Path, meta: CheckpointMeta) -> None:
    """Writes meta.json and then, when all is on disk, the marker; on one rank, after every rank's save."""
    (folder / META).write_text(json.dumps(asdict(meta), indent=2) + "\n")
    for path in folder.iterdir():
        sync(path)
    marker = folder / f".{MARKER}"
    marker.touch()
    sync(marker)
    marker.replace(folder / MARKER)
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


def read_meta(folder: Path) -> CheckpointMeta:
    """
    Raises:
        ConfigError: meta.json is missing or damaged.
    """
    try:
        return CheckpointMeta(**json.loads((folder / META).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"run.resume: {folder / META} is damaged; take another checkpoint.") from error


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Whole ones, oldest first."""
    found = (folder for folder in checkpoints.glob("step_*") if is_complete(folder))
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def resume_point(resume: str, output_dir: Path, name: str, identity: RunIdentity) -> Path | None:
    """The checkpoint that ``run.resume`` means; None: start afresh.

    Raises:
        ConfigError: there is none where one was named, or it belongs to another run.
    """
    if resume == "never":
        return None
    point = newest(output_dir / name) if resume == "auto" else named(Path(resume))
    if point is not None:
        check_resumable(point, identity)
    return point


def newest(runs: Path) -> Path | None:
    """Of the newest run folder that holds a complete checkpoint."""
    for run in sorted((path for path in runs.glob("*") if path.is_dir()), key=run_order, reverse=True):
        if found := complete_checkpoints(run / "checkpoints"):
            return found[-1]
    return None


def run_order(run: Path) -> tuple[str, int]:
    """By stamp, then by the number that tells apart runs of one second."""
    stamp, _, number = run.name.partition("__")
    return stamp, int(number) if number.isdigit() else 0


def named(path: Path) -> Path:
    path = path.expanduser()
    if is_complete(path):
        return path
    if path.name.startswith("step_") and path.is_dir():
        raise ConfigError(f"run.resume: {path} was never completed; take another checkpoint of its run.")
    if found := complete_checkpoints(path / "checkpoints"):
        return found[-1]
    reason = "holds no complete checkpoint" if path.is_dir() else "is not a folder"
    raise ConfigError(f"run.resume: {path} {reason}; give a run folder or a checkpoint folder, or never.")


def check_resumable(point: Path, identity: RunIdentity) -> None:
    meta = read_meta(point)
    if meta.model_only:
        raise ConfigError(
            f"run.resume: {point} holds weights alone (run.save_model_only=true); nothing can resume from it."
        )
    ours = asdict(identity)
    for key, remedy in REMEDIES.items():
        theirs = meta.identity.get(key)
        if ours[key] != theirs:
            if key == "reference" and theirs is None:
                remedy = "its run had no reference; set stage.reference=none"
            raise ConfigError(f"run.resume: {point}: {remedy.format(theirs=theirs)}.")
