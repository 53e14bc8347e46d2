"""Curves of metrics.jsonl, thinned to few enough points for a page."""

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

Floats = NDArray[np.float64]
SECONDS = "train/seconds"
"""Name of a curve: the time of training in seconds, summed from step times, because metrics.jsonl has no
times of day."""
RENAMED = {
    "train/num_samples": "train/total_samples",
    "train/skipped": "train/total_skipped",
    "train/main_loss": "train/lm_loss",
    "perf/memory_gib": "perf/rss_gib",
}
OLD_NAMES = (
    (re.compile(r"/rewards_(chosen|rejected)$"), r"/rewards/\1"),
    (re.compile(r"/rewards_margin$"), "/rewards/margins"),
    (re.compile(r"/(mtp_\d+)$"), r"/\1_loss"),
)
"""Patterns of metric names before version 0.2.0, and their current names. ``RENAMED`` has further ones."""
OLD_ACCURACY = (re.compile(r"/accuracy$"), "/rewards/accuracies")
"""The same for preference losses; ``accuracy`` is the current name for reward models."""
BLOCK_SIZE = 32 * 2**20
"""Minimum size in bytes of a block for the JSON parser. A file is parsed as one block, because a column may
first appear in any line of a block, but not in a later block."""


@dataclass(frozen=True)
class Curve:
    """One metric on the page: means of neighbouring values, ordered by step."""

    steps: Floats
    means: Floats
    low: Floats | None
    high: Floats | None
    """The extremes of the values in each mean, which show spikes. None means that no values were merged."""
    last: float
    """The last value."""
    last_step: float
    """The step of the last value."""

    def to_json(self) -> dict[str, str]:
        """Return the arrays as base64 of little-endian float32, without those that are None."""
        parts = {name: getattr(self, name) for name in ("steps", "means", "low", "high")}
        return {name: encode_array(values) for name, values in parts.items() if values is not None}


def thin(steps: Floats, values: Floats, count: int) -> Curve:
    """Return a curve of at most ``count`` means."""
    width, last, last_step = -(-len(steps) // count), float(values[-1]), float(steps[-1])
    if width == 1:
        return Curve(steps, values, None, None, last, last_step)
    starts = np.arange(0, len(steps), width)
    sizes = np.diff(np.append(starts, len(steps)))
    return Curve(
        np.add.reduceat(steps, starts) / sizes,
        np.add.reduceat(values, starts) / sizes,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        last,
        last_step,
    )


def read_curves(path: Path, count: int, *, resumed: bool = False) -> dict[str, Curve]:
    """Return the curve of each metric, without non-finite values and without an incomplete last line.

    Each curve has at most ``count`` points, which are means of neighbouring values if there are more.
    ``resumed`` says that the first step of the file may not be the first step of training.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it does not hold rows of numbers with a step.
    """
    data = path.read_bytes()
    data = data[: data.rfind(b"\n") + 1]
    if not data.strip():
        return {}
    options = arrow_json.ReadOptions(block_size=max(BLOCK_SIZE, len(data)))
    table = arrow_json.read_json(pa.BufferReader(data), read_options=options)
    names = current_names(table.column_names)
    columns = {new: numbers(table.column(name)) for name, new in names.items()}
    if (steps := columns.pop("step", None)) is None:
        raise ValueError(f"{path.name} has no step")
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        columns = {key: None if values is None else values[order] for key, values in columns.items()}
    if (step_ms := columns.get("perf/step_ms")) is not None:
        columns[SECONDS] = training_seconds(steps, step_ms, resumed=resumed)
    return {
        key: thin(steps[known], values[known], count)
        for key, values in columns.items()
        if values is not None and (known := np.isfinite(values) & np.isfinite(steps)).any()
    }


def current_names(names: Iterable[str]) -> dict[str, str]:
    """Return the current name of each metric of a run.

    ``accuracy`` is an old name only in a run of a preference loss, which also has ``rewards_chosen``. In a
    run of a reward model it is the current name.
    """
    found = {name: RENAMED.get(name, name) for name in names}
    of_pairs = any(name.endswith("/rewards_chosen") for name in found)
    for old, new in (*OLD_NAMES, *([OLD_ACCURACY] if of_pairs else [])):
        found = {name: old.sub(new, current) for name, current in found.items()}
    return found


def numbers(column: pa.ChunkedArray) -> Floats | None:
    """Return the values, with NaN for missing ones. None means that the column does not hold numbers."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return None
    return column.cast(pa.float64()).to_numpy()


def training_seconds(steps: Floats, step_ms: Floats, *, resumed: bool) -> Floats:
    """Return the training time up to each row, in seconds, without evaluations and saves.

    It is NaN in rows without a step time.
    """
    seconds, known = np.full(len(steps), np.nan), np.isfinite(step_ms)
    if known.any():
        counts = np.diff(steps[known], prepend=0)
        # The first row of a resumed run does not stand for all the steps before it.
        counts[0] = min(counts[0], np.median(counts[1:])) if resumed and len(counts) > 1 else counts[0]
        seconds[known] = np.cumsum(counts * step_ms[known]) / 1000
    return seconds


def encode_array(values: Floats) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
