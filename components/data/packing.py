"""The order of samples and their packing into rows: a pure function of data and seed, not of ranks."""

import shutil
import tempfile
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from components.data.store.checked_files import load_array, save_array

Ints = npt.NDArray[np.int64]
Packing = Literal["bfd", "concat", "none"]

WINDOW = 4096
"""Number of consecutive samples, in the order of the epoch, that are packed together."""


@dataclass(frozen=True)
class Plan:
    """The rows of one epoch in training order. Row i is ``segments[row_offsets[i]:row_offsets[i + 1]]``."""

    segments: Ints
    """int64 ``[N, 3]``: sequence, and the first and past-the-last of its tokens that serve as input.

    If the prompt of a pair is computed once, the segment of the rejected sequence begins after the shared
    tokens. The segment before it is the chosen sequence.
    """
    row_offsets: Ints
    """int64 ``[R + 1]``: the index of the first segment of each row, followed by the number of segments."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, index: int) -> Ints:
        """Return the segments of one row, int64 ``[n, 3]``."""
        return self.rows(index, index + 1)

    def rows(self, start: int, stop: int) -> Ints:
        """Return the segments of rows ``start`` to ``stop - 1``, int64 ``[n, 3]``."""
        return self.segments[self.row_offsets[start] : self.row_offsets[stop]]

    def microbatch_lengths(self, micro_batch_size: int, *, packed: bool) -> Ints:
        """Return the length of each micro-batch of consecutive rows, int64 ``[ceil(R / micro_batch_size)]``.

        With packing, the length is the number of tokens in all rows of the micro-batch; without packing, the
        number of tokens in its longest segment.
        """
        combine = np.add if packed else np.maximum
        rows = combine.reduceat(self.segments[:, 2] - self.segments[:, 1], self.row_offsets[:-1])
        return combine.reduceat(rows, np.arange(0, len(rows), micro_batch_size))

    def save(self, folder: Path) -> None:
        """Write the plan to ``folder``, as a whole or not at all."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        save_array(temporary / "segments.npy", self.segments)
        save_array(temporary / "row_offsets.npy", self.row_offsets)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open a plan, memory-mapped.

        Raises:
            DamagedFile: if a file is missing or damaged.
        """
        return cls(load_array(folder / "segments.npy"), load_array(folder / "row_offsets.npy"))


@dataclass(frozen=True)
class PlanOptions:
    """Options that all epochs of a run share."""

    packing: Packing
    max_length: int
    shuffle: bool
    seed: int = 0


def plan_epoch(
    lengths: Ints,
    options: PlanOptions,
    epoch: int,
    *,
    sequences_per_sample: int = 1,
    repeats: npt.NDArray[np.float64] | None = None,
    firsts: Sequence[int] = (0,),
    shared: Ints | None = None,
) -> Plan:
    """Plan one pass over the data.

    With the packing ``none``, a row is a sample. With ``bfd``, every ``WINDOW`` samples are packed by
    best-fit decreasing into rows of at most ``sequences_per_sample * max_length`` tokens; the rows of a
    window are then shuffled, so that rows of long and of short sequences mix. With ``concat``, the sequences
    are placed end to end and cut every ``max_length`` tokens.

    Without ``shuffle`` samples keep their order; the rows of a bfd window are ordered by their first sample.

    Args:
        lengths: int64 ``[S]``, tokens of each sequence. Sample ``i`` has ``sequences_per_sample`` sequences,
            the first of which is ``i * sequences_per_sample``.
        repeats: float64 per sample, how often an epoch contains it. A share f of the samples of a source with
            the same fractional part f is drawn anew every epoch for one more pass. None means once.
        firsts: the first sample of each source.
        shared: int64 per pair, only with bfd: the number of leading tokens of the second sequence that are
            computed only as part of the first one. None means that no pair shares tokens.
    """
    assert shared is None or (options.packing == "bfd" and sequences_per_sample == 2), (
        "only packed pairs share"
    )
    count = len(lengths) // sequences_per_sample
    starts = np.zeros((count, sequences_per_sample), np.int64)
    if shared is not None:
        starts[:, 1] = shared
    seed, max_length = options.seed, options.max_length
    times = None if repeats is None else _draw(repeats, firsts, _generator(seed, epoch, "repeats"))
    order = _epoch_order(count, times, seed, epoch, options.shuffle)
    if options.packing == "concat":
        assert sequences_per_sample == 1, "a pair cannot be cut"
        return _cut(lengths, order, max_length)
    if options.packing == "none":
        rows = np.arange(len(order) + 1)
    else:
        sizes = (lengths.reshape(starts.shape) - starts).sum(1)[order]
        rng = _generator(seed, epoch, "rows") if options.shuffle else None
        positions, rows = _pack(sizes, sequences_per_sample * max_length, rng)
        order = order[positions]
    sequences = order[:, None] * sequences_per_sample + np.arange(sequences_per_sample)
    sequences = sequences.reshape(-1)
    segments = np.stack([sequences, starts.reshape(-1)[sequences], lengths[sequences]], axis=1)
    return Plan(segments, rows.astype(np.int64) * sequences_per_sample)


def hold_out(kept: npt.NDArray[np.bool_], fraction: float, seed: int) -> npt.NDArray[np.int64]:
    """Return the indices of the records to hold out of training, int64, in the order of the draw.

    There is at least one, unless no record has a sample. They are drawn from all records, with or without a
    sample, so that another ``data.max_length`` moves none of those drawn to the other split.

    Args:
        kept: whether each record gives a sample, bool ``[R]``.
        fraction: the share of the records to hold out, above 0.
    """
    order = _generator(seed, 0, "hold_out").permutation(len(kept))
    first = np.flatnonzero(kept[order])[:1] + 1  # empty if no record gives a sample
    drawn = order[: max([round(fraction * len(kept)), *first.tolist()])].astype(np.int64)
    return drawn[kept[drawn]]


def _generator(seed: int, epoch: int, purpose: str) -> np.random.RandomState:
    """Return the random generator for one purpose in one epoch.

    It is a RandomState, whose streams numpy has frozen: a resumed run must make the same plan with a later
    numpy.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch, *purpose.encode()]
    return np.random.RandomState(words)


def _epoch_order(count: int, times: Ints | None, seed: int, epoch: int, shuffle: bool) -> Ints:
    """Return the samples in the order of the epoch, each as often as ``times`` says. None means once."""
    order = np.arange(count, dtype=np.int64)
    if times is not None:
        order = np.repeat(order, times)
    return _generator(seed, epoch, "order").permutation(order) if shuffle else order


def _draw(repeats: npt.NDArray[np.float64], firsts: Sequence[int], rng: np.random.RandomState) -> Ints:
    """Return how often the epoch contains each sample."""
    counts = np.floor(repeats).astype(np.int64)
    fractions = repeats - counts
    for fraction in np.unique(fractions[fractions > 0]):
        members = np.flatnonzero(fractions == fraction)
        for own in np.split(members, np.searchsorted(members, firsts[1:])):
            if len(own):
                number = int(fraction * len(own) + rng.random_sample())  # right on average even for a few
                counts[rng.permutation(own)[:number]] += 1
    return counts


def _pack(sizes: Ints, capacity: int, rng: np.random.RandomState | None) -> tuple[Ints, Ints]:
    """Return the indices in ``sizes``, row after row, and the row offsets as in ``Plan.row_offsets``."""
    rows: list[list[int]] = []
    for start in range(0, len(sizes), WINDOW):
        packed = best_fit_decreasing(sizes[start : start + WINDOW], capacity)
        turn = range(len(packed)) if rng is None else rng.permutation(len(packed)).tolist()
        rows += [[start + item for item in packed[i]] for i in turn]
    positions = np.fromiter((item for row in rows for item in row), dtype=np.int64, count=len(sizes))
    return positions, np.cumsum([0, *map(len, rows)])


def best_fit_decreasing(sizes: Ints, capacity: int) -> list[list[int]]:
    """Return the items of each bin in ascending order, with bins ordered by their first item.

    The items are placed from the largest to the smallest, each into the fullest bin that still has room for
    it, or into a new bin.
    """
    bins: list[list[int]] = []
    # Sorted values of room * len(sizes) + bin: one number, because comparing tuples takes twice as long.
    room: list[int] = []
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
    """Return a plan with the documents of ``order`` end to end; a segment ends with its document or row."""
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
