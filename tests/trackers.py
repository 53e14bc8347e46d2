"""Readers of the files that trackers write."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the points ``(step, float32 value)`` of each tag, as TensorBoard shows them."""
    found = events(folder)
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def tags(folder: Path) -> set[str]:
    """Return the tags of texts and hyperparameters."""
    found = events(folder)
    return {*found.Tags()["tensors"], *found.summary_metadata}


@dataclass
class WandbRun:
    """One file of an offline run of Weights & Biases."""

    path: Path
    start: Any = None
    """RunRecord of wandb."""
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    artifact_files: set[str] = field(default_factory=set)
    exit_code: int | None = None
    preempting: bool = False


def wandb_runs(folder: Path) -> list[WandbRun]:
    """Return the offline runs in a run folder in the order of their start."""
    paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [read_wandb(path) for path in paths]


def read_wandb(path: Path) -> WandbRun:
    run = WandbRun(path)
    for record in records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.start = run.start or record.run
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            values = items(record.history.item)
            kept = {key: value for key, value in values.items() if not key.startswith("_")}
            run.history.setdefault(values["_step"], {}).update(kept)
        elif kind == "summary":
            run.summary |= items(record.summary.update)
        elif kind == "artifact" or (kind == "request" and record.request.HasField("log_artifact")):
            artifact = record.artifact if kind == "artifact" else record.request.log_artifact.artifact
            run.artifact_files |= {entry.path for entry in artifact.manifest.contents}
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
        elif kind == "preempting":
            run.preempting = True
    return run


def items(updates: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def records(data: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file.

    Its format is LevelDB's log format: blocks of 32 KiB, here after a file header of 7 bytes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    position, parts = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record or its last part
            yield Record.FromString(parts)
            parts = b""
