"""The order of samples and how they share rows: a pure function of the data and the seed, never of ranks."""

import shutil
import tempfile
from bisect import bisect_left, insort
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Packing = Literal["bfd", "concat", "none"]

WINDOW = 4096
"""Samples, neighbours in the epoch's order, that are packed together."""


@dataclass(frozen=True)
class Plan:
    """The rows of one epoch in training order; row ``i``: ``segments[row_offsets[i]:row_offsets[i + 1]]``."""

    segments: Ints
    """int64 ``[N, 3]``: sequence, and the first and past-the-last of its tokens that serve as input.

    The rejected sequence of a pair begins after what it shares with the chosen one, the segment before.
    """
    row_offsets: Ints
    """int64 ``[R + 1]``"""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, index: int) -> Ints:
        """int64 ``[n, 3]``: the segments of one row."""
        return self.rows(index, index + 1)

    def rows(self, start: int, stop: int) -> Ints:
        """int64 ``[n, 3]``: the segments of rows ``start`` to ``stop``."""
        return self.segments[self.row_offsets[start] : self.row_offsets[stop]]

    def save(self, folder: Path) -> None:
        """Writes ``folder`` whole or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        np.save(temporary / "segments.npy", self.segments)
        np.save(temporary / "row_offsets.npy", self.row_offsets)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Memory-mapped. OSError or ValueError: the folder is missing or torn."""
        names = ("segments", "row_offsets")
        return cls(*(np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in names))


def plan_epoch(
    lengths: Ints,
    *,
    sequences_per_sample: int,
    repeats: npt.NDArray[np.float64] | None,
    seed: int,
    epoch: int,
    max_length: int,
    packing: Packing,
    shuffle: bool,
    shared: Ints | None = None,
) -> Plan:
    """Plans one pass over the data.

    none: a row is a sample. bfd: the samples of every ``WINDOW`` by best-fit decreasing into rows of at most
    ``sequences_per_sample * max_length`` tokens; the rows of a window are then shuffled, so that length does
    not follow time. concat: the sequences end to end, cut every ``max_length`` tokens.

    Without ``shuffle`` samples keep their order; a row of bfd stands where its first sample stood.

    Args:
        lengths: int64 ``[S]``, tokens of every sequence; sample ``i`` is the ``sequences_per_sample`` from
            ``i * sequences_per_sample`` on.
        repeats: float64 per sample, how often an epoch sees it; of those with a fraction, as many are drawn
            anew every epoch. None: once.
        shared: int64 per pair, of bfd: first tokens of the second sequence that the first one computes for
            both. None: of no pair.
    """
    assert shared is None or (packing == "bfd" and sequences_per_sample == 2), "only packed pairs share"
    count = len(lengths) // sequences_per_sample
    starts = np.zeros((count, sequences_per_sample), np.int64)
    if shared is not None:
        starts[:, 1] = shared
    order = _epoch_order(count, repeats, seed, epoch, shuffle)
    if packing == "concat":
        assert sequences_per_sample == 1, "a pair cannot be cut"
        return _cut(lengths, order, max_length)
    if packing == "none":
        rows = np.arange(len(order) + 1)
    else:
        sizes = (lengths.reshape(starts.shape) - starts).sum(1)[order]
        rng = _generator(seed, epoch, "rows") if shuffle else None
        positions, rows = _pack(sizes, sequences_per_sample * max_length, rng)
        order = order[positions]
    sequences = order[:, None] * sequences_per_sample + np.arange(sequences_per_sample)
    sequences = sequences.reshape(-1)
    segments = np.stack([sequences, starts.reshape(-1)[sequences], lengths[sequences]], axis=1)
    return Plan(segments, rows.astype(np.int64) * sequences_per_sample)


def hold_out(count: int, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """bool ``[count]``: which samples are kept from training; at least one where ``fraction`` is above 0."""
    held = np.zeros(count, dtype=np.bool_)
    if fraction > 0:
        number = max(1, round(fraction * count))
        held[_generator(seed, 0, "hold_out").permutation(count)[:number]] = True
    return held


def _generator(seed: int, epoch: int, purpose: str) -> np.random.RandomState:
    """RandomState, as numpy froze its streams: a resumed run must find the same plan with a later numpy."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, *purpose.encode()]
    return np.random.RandomState(words)


def _epoch_order(
    count: int, repeats: npt.NDArray[np.float64] | None, seed: int, epoch: int, shuffle: bool
) -> Ints:
    """Samples in the order of the epoch, as often as it sees them."""
    order = np.arange(count, dtype=np.int64)
    if repeats is not None:
        order = np.repeat(order, _draw(repeats, _generator(seed, epoch, "repeats")))
    return _generator(seed, epoch, "order").permutation(order) if shuffle else order


def _draw(repeats: npt.NDArray[np.float64], rng: np.random.RandomState) -> Ints:
    counts = np.floor(repeats).astype(np.int64)
    fractions = repeats - counts
    for fraction in np.unique(fractions[fractions > 0]):
        members = np.flatnonzero(fractions == fraction)
        number = int(fraction * len(members) + rng.random_sample())  # right on average for few members too
        counts[rng.permutation(members)[:number]] += 1
    return counts


def _pack(sizes: Ints, capacity: int, rng: np.random.RandomState | None) -> tuple[Ints, Ints]:
    """Positions row after row, and where every row begins among them (with the end)."""
    rows: list[list[int]] = []
    for start in range(0, len(sizes), WINDOW):
        packed = best_fit_decreasing(sizes[start : start + WINDOW], capacity)
        turn = range(len(packed)) if rng is None else rng.permutation(len(packed)).tolist()
        rows += [[start + item for item in packed[i]] for i in turn]
    positions = np.fromiter((item for row in rows for item in row), dtype=np.int64, count=len(sizes))
    return positions, np.cumsum([0, *map(len, rows)])


def best_fit_decreasing(sizes: Ints, capacity: int) -> list[list[int]]:
    """Items of each bin in ascending order, bins by their first item.

    The longest item first, each into the bin with the least room that takes it. O(n log n).
    """
    bins: list[list[int]] = []
    room: list[
        int
    ] = []  # sorted: room * len(sizes) + bin, one number as comparing tuples takes twice as long
    unit, needs = len(sizes), sizes.tolist()
    for item in np.argsort(-sizes, kind="stable").tolist():
        need = needs[item]
        assert 0 < need <= capacity, (need, capacity)
        at = bisect_left(room, need * unit)
        if at < len(room):
            left, chosen = divmod(room.pop(at), unit)
            bins[chosen].append(item)
        else:
            left, chosen = capacity, len(bins)
            bins.append([item])
        if left > need:
            insort(room, (left - need) * unit + chosen)
    return sorted(sorted(packed) for packed in bins)


def _cut(lengths: Ints, order: Ints, max_length: int) -> Plan:
    """Documents of ``order`` end to end; a segment ends with its document or its row."""
    ends = np.cumsum(lengths[order])
    assert len(order) == 0 or lengths[order].min() > 0
    total = int(ends[-1]) if len(ends) else 0
    row_ends = np.append(np.arange(max_length, total, max_length), [total] if total else [])
    stops = np.union1d(ends, row_ends).astype(np.int64)
    starts = np.concatenate([[0], stops])[:-1]
    document = np.searchsorted(ends, starts, side="right")
    before = (ends - lengths[order])[document]
    segments = np.stack([order[document], starts - before, stops - before], axis=1)
    return Plan(segments, np.append(0, np.searchsorted(stops, row_ends) + 1).astype(np.int64))
