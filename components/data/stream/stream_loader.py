"""Global batches of a stream."""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

import numpy as np

from components.contracts.batch import Batch
from components.contracts.data import BatchShard, BatchStats
from components.contracts.errors import NonRetryableError, TrainingError
from components.contracts.json_types import Json
from components.data.global_batch import GlobalBatch
from components.data.packing import Plan
from components.data.store.checked_files import DamagedFile, read_checked_json
from components.data.store.concat_store import ConcatTokens
from components.data.store.token_store import list_bad_records
from components.data.stream.chunks import COMPLETE, Chunk, Stream, chunk_name
from components.data.stream.producer import FAILURE, SKIPPED, Producer

log = logging.getLogger(__name__)

_POLL_S = 0.02
_KEPT_STEPS = 2  # another rank may be a step behind, and batches are read a step ahead
_NAMED = 10  # bad records of a chunk that the log names


class StreamLoader:
    """A ``components.contracts.data.DataLoader`` of a stream.

    A global batch consists of the next rows of the stream, if necessary from several chunks. The position of
    a step is computed step by step from one whose position is known; a checkpoint stores the position of its
    next step.
    """

    def __init__(
        self,
        stream: Stream,
        shard: BatchShard,
        folder: Path,
        producer: Producer | None,
        *,
        num_steps: int,
        step: int,
        position: Sequence[int],
        beat: Callable[[], object],
    ) -> None:
        """Create a loader that begins at ``step``.

        Args:
            folder: the folder of the chunks.
            producer: the process that makes the chunks. None except on rank 0.
            position: chunk and row of its plan at which ``step`` begins. Empty for the start of the stream.
            beat: called whenever the process has skipped more of the records before ``position``.
        """
        self._stream, self._shard, self._folder, self._producer = stream, shard, folder, producer
        self._beat = beat
        self._skipped: Json = {}
        self.num_steps, self._first = num_steps, step
        chunk, row = position or (0, 0)
        self._starts = {step: (chunk, row)}
        self._chunks: dict[int, Chunk] = {}
        self._batches: dict[int, GlobalBatch] = {}
        self._lock, self._closed = RLock(), False  # batches are read ahead in a thread

    def microbatches(self, step: int) -> list[Batch]:
        batch = self.batch(step)
        return [self._stream.collation(batch.tokens, rows, step) for rows in batch.shares(self._shard)]

    def stats(self, step: int) -> BatchStats:
        return self.batch(step).stats()

    def sample_ids(self, step: int) -> list[str]:
        return self.batch(step).sample_ids()

    def epoch(self, step: int) -> float | None:  # noqa: ARG002
        """Return None, because a stream has no epochs."""
        return None

    def largest_microbatch(self) -> tuple[int, int]:
        """Return the step and the index of the micro-batch with the most tokens in the first chunk read."""
        chunk, row = self._starts[self._first]
        rows, size = self._shard.global_batch_size, self._shard.micro_batch_size
        plan = self._chunk(chunk).plan
        steps = min((plan.num_rows - row) // rows, self.num_steps - self._first)
        if steps < 1:
            return self._first, 0
        offsets = plan.row_offsets[row : row + steps * rows + 1]
        left = Plan(plan.segments[: offsets[-1]], offsets)
        lengths = left.microbatch_lengths(size, packed=self._stream.collation.packed)
        step, place = divmod(int(lengths.argmax()), rows // size)
        return self._first + step, place // self._shard.dp_size

    def advance(self, step: int) -> list[int]:
        """Delete the chunks that only steps before ``step - _KEPT_STEPS`` need.

        Returns the chunk and the row at which ``step`` begins.
        """
        oldest = max(step - _KEPT_STEPS, min(self._starts))
        for past in [known for known in list(self._starts) if known < oldest]:
            self._starts.pop(past)
            self._batches.pop(past, None)
        for chunk in [number for number in list(self._chunks) if number < self._starts[oldest][0]]:
            self._chunks.pop(chunk)
            if self._producer is not None:
                shutil.rmtree(self._folder / chunk_name(chunk))
        return list(self._starts[step])

    def close(self) -> None:
        self._closed = True
        if self._producer is not None:
            self._producer.close()

    def batch(self, step: int) -> GlobalBatch:
        """Return the global batch of ``step``, after waiting for its chunks if necessary.

        Raises:
            TrainingError: if the chunks cannot be made, or the loader was closed. It is a NonRetryableError
                if that would recur.
        """
        found = self._batches.get(step)
        if found is not None:
            return found
        with self._lock:
            for number in range(max(known for known in list(self._starts) if known <= step), step + 1):
                if number not in self._batches:
                    self._batches[number] = self._read(number)
            return self._batches[step]

    def _read(self, step: int) -> GlobalBatch:
        """Return the global batch of a step whose position is known; store the position of the next step."""
        assert self._first <= step < self.num_steps, (self._first, step, self.num_steps)
        chunk, row = self._starts[step]
        left, parts = self._shard.global_batch_size, []
        while left:
            found = self._chunk(chunk)
            stop = min(row + left, found.plan.num_rows)
            if row < stop:
                parts.append(GlobalBatch(found.tokens, found.plan, row, stop))
                left -= stop - row
            chunk, row = (chunk, stop) if stop < found.plan.num_rows else (chunk + 1, 0)
        self._starts[step + 1] = chunk, row
        return _joined(parts)

    def _chunk(self, chunk: int) -> Chunk:
        with self._lock:
            if chunk not in self._chunks:
                self._wait(chunk)
                self._chunks[chunk] = self._stream.open(self._folder, chunk)
                if self._producer is not None:
                    self._producer.request()
                    self._warn(chunk)
            return self._chunks[chunk]

    def _wait(self, chunk: int) -> None:
        if self._producer is not None:
            self._producer.start(chunk)
        while not (self._folder / chunk_name(chunk) / COMPLETE).exists():
            if self._producer is not None:
                self._producer.check()
            if (self._folder / FAILURE).exists():
                failure = read_checked_json(self._folder / FAILURE)
                raise (NonRetryableError if failure["final"] else TrainingError)(failure["reason"])
            if self._closed:
                raise NonRetryableError("the stream was closed")
            self._follow_skipping()
            time.sleep(_POLL_S)

    def _follow_skipping(self) -> None:
        """If the process has skipped more records, call ``beat``; rank 0 also logs their number."""
        with suppress(DamagedFile):  # the file exists only if records are skipped
            found = read_checked_json(self._folder / SKIPPED)
            if found == self._skipped:
                return
            self._skipped = found
            self._beat()
            if self._producer is not None:
                numbers = f"{found['skipped']:,} of {found['of']:,}"
                log.info("%s: skipped %s records that earlier steps used", found["option"], numbers)

    def _warn(self, chunk: int) -> None:
        """Log and list in a file the records of a chunk that are left out because they cannot be read."""
        bad = self._chunks[chunk].bad
        for _, record in bad[:_NAMED]:
            log.warning("left out: %s: %s", record.origin, record.reason)
        if len(bad) > _NAMED:
            log.warning("left out: %d more records of chunk %d that cannot be read", len(bad) - _NAMED, chunk)
        list_bad_records(self._folder.parent, bad)


def _joined(parts: Sequence[GlobalBatch]) -> GlobalBatch:
    """Return one batch with the rows of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    segments, offsets, before = [], [np.zeros(1, np.int64)], 0
    for part in parts:
        mine = part.segments + np.array([before, 0, 0])
        rows = part.plan.row_offsets[part.start : part.stop + 1]
        segments.append(mine)
        offsets.append(rows[1:] - rows[0] + offsets[-1][-1])
        before += len(part.tokens.lengths)
    plan = Plan(np.concatenate(segments), np.concatenate(offsets))
    return GlobalBatch(ConcatTokens([part.tokens for part in parts]), plan, 0, plan.num_rows)
