"""Several token stores as one."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from components.data.store.token_sequences import Array, Bools, Floats, Ints, TokenSequences


class ConcatTokens:
    """The ``TokenSequences`` that consist of the samples of several stores, one store after the other."""

    def __init__(self, parts: Sequence[TokenSequences]) -> None:
        assert len({part.sequences_per_sample for part in parts}) == 1
        self._parts = parts
        counts = [len(part.lengths) for part in parts]
        self._starts = [sum(counts[:i]) for i in range(len(parts))]

    @property
    def sequences_per_sample(self) -> int:
        return self._parts[0].sequences_per_sample

    @property
    def first_samples(self) -> list[int]:
        """The index of the first sample of each store."""
        return [start // self.sequences_per_sample for start in self._starts]

    @cached_property
    def desirable(self) -> Bools | None:
        found = [part.desirable for part in self._parts if part.desirable is not None]
        assert len(found) in (0, len(self._parts)), "all sources are of one kind"
        return np.concatenate(found) if found else None

    @cached_property
    def margins(self) -> Floats | None:
        found = [part.margins for part in self._parts if part.margins is not None]
        assert len(found) in (0, len(self._parts)), "all sources are of one kind"
        return np.concatenate(found) if found else None

    @cached_property
    def lengths(self) -> Ints:
        return np.concatenate([part.lengths for part in self._parts])

    def tokens(self, sequence: int, start: int, stop: int) -> Array:
        part, local = self._locate(sequence)
        return part.tokens(local, start, stop)

    def mask(self, sequence: int, start: int, stop: int) -> Bools:
        part, local = self._locate(sequence)
        return part.mask(local, start, stop)

    def origin(self, sample: int) -> str:
        part, sequence = self._locate(sample * self.sequences_per_sample)
        return part.origin(sequence // self.sequences_per_sample)

    def _locate(self, sequence: int) -> tuple[TokenSequences, int]:
        part = bisect_right(self._starts, sequence) - 1
        return self._parts[part], sequence - self._starts[part]
