"""One global batch: some rows of a plan, their micro-batches and their statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from components.contracts.batch import Batch
from components.contracts.data import BatchShard, BatchStats
from components.data.collators import collate_packed, collate_padded, prefix_lengths
from components.data.packing import Ints, Plan
from components.data.store.token_sequences import TokenSequences


@dataclass(frozen=True)
class Collation:
    """A function that collates rows into a ``Batch``, packed or padded."""

    packed: bool
    pad_id: int

    def __call__(self, tokens: TokenSequences, rows: Sequence[Ints], step: int) -> Batch:
        collate: Callable[..., Batch] = collate_packed if self.packed else collate_padded
        batch = collate(tokens, rows, self.pad_id)
        assert batch.sequence_keys is not None
        # A sequence occurs in every epoch, and its number in every chunk of a stream. The step makes the keys
        # differ.
        return replace(batch, sequence_keys=batch.sequence_keys ^ step * 0x9E3779B97F4A7C15 % (1 << 63))


@dataclass(frozen=True)
class GlobalBatch:
    """Rows ``start`` to ``stop - 1`` of ``plan``."""

    tokens: TokenSequences
    plan: Plan
    start: int
    stop: int

    @property
    def segments(self) -> Ints:
        """The segments of all rows, int64 ``[n, 3]`` with the columns of ``Plan.segments``."""
        return self.plan.rows(self.start, self.stop)

    def shares(self, shard: BatchShard) -> list[list[Ints]]:
        """Return the rows of each micro-batch of a rank, each row as its segments, int64 ``[n, 3]``.

        There are ``ceil(rows / (dp_size * micro_batch_size))`` micro-batches on every rank. Micro-batch ``j``
        of data-parallel rank ``r`` takes ``micro_batch_size`` rows, the first of which is row
        ``(j * dp_size + r) * micro_batch_size`` of the global batch. Rows beyond the end are empty.
        """
        size = shard.micro_batch_size
        share, mine = shard.dp_size * size, shard.dp_rank * size
        count = (self.stop - self.start + share - 1) // share
        firsts = range(self.start + mine, self.start + mine + count * share, share)
        return [[self._row(row) for row in range(first, first + size)] for first in firsts]

    def _row(self, row: int) -> Ints:
        return self.plan.row(row) if row < self.stop else np.empty((0, 3), np.int64)

    def stats(self) -> BatchStats:
        """Return the statistics of the global batch.

        ``num_samples`` counts a document that is cut across rows only in the global batch in which it begins.
        Mismatched answers of unpaired data are left out, because they are not trained on.
        """
        segments, per_sample = np.asarray(self.segments), self.tokens.sequences_per_sample
        if self.tokens.desirable is not None:
            segments, per_sample = segments[segments[:, 0] % 2 == 0], 1
        prefixes = prefix_lengths(self.tokens, segments)
        computed = segments[:, 2] - segments[:, 1]
        lengths = computed + prefixes
        begun = int((segments[:, 1] == prefixes).sum())
        targets = (self.tokens.mask(seq, start + 1, stop + 1) for seq, start, stop in segments.tolist())
        return BatchStats(
            num_tokens=int(lengths.sum()),
            num_computed_tokens=int(computed.sum()),
            num_samples=begun // per_sample,
            num_labels=sum(int(np.count_nonzero(mask)) for mask in targets),
            seqlen_mean=float(lengths.mean()),
            seqlen_max=int(lengths.max()),
            sum_squared_seqlens=int((lengths**2 - prefixes**2).sum()),
        )

    def sample_ids(self) -> list[str]:
        """Return the ``TokenSequences.origin`` of each sample once, in the order of the rows."""
        samples = self.segments[:, 0] // self.tokens.sequences_per_sample
        return [self.tokens.origin(sample) for sample in dict.fromkeys(samples.tolist())]
