"""The chunks of a stream: their records, and their place on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from pathlib import Path

from components.contracts.errors import ConfigError
from components.data.global_batch import Collation
from components.data.packing import Plan, PlanOptions, plan_epoch
from components.data.shared_prefix import shared_lengths
from components.data.store.checked_files import read_checked_json
from components.data.store.concat_store import ConcatTokens
from components.data.store.token_store import BadRecord, TokenStore

COMPLETE = "chunk.json"
"""Name of the file that lists the sources with samples in a chunk. It is the last file of a chunk that is
written."""


@dataclass(frozen=True)
class Stream:
    """The division of the records of a stream into chunks, and of the samples of a chunk into rows."""

    options: tuple[str, ...]
    """The option that names each source."""
    records_per_chunk: tuple[float, ...]
    """Mean number of records of each source in a chunk."""
    plan: PlanOptions
    share_prompt: bool
    collation: Collation

    def records(self, source: int, chunk: int) -> tuple[int, int]:
        """Return the numbers of the first record of ``source`` in ``chunk`` and of the one after the last.

        Records are counted from 0. A source that ends begins again, so the numbers have no upper limit.
        """
        mean = self.records_per_chunk[source]
        return floor(chunk * mean), floor((chunk + 1) * mean)

    def num_records(self, source: int, chunk: int) -> int:
        start, stop = self.records(source, chunk)
        return stop - start

    def open(self, folder: Path, chunk: int) -> "Chunk":
        """Open a complete chunk in ``folder``, and plan its rows."""
        place = folder / chunk_name(chunk)
        stores = [
            TokenStore.open(place / str(source), option, self.records(source, chunk)[0])
            for source, option in enumerate(self.options)
        ]
        tokens = ConcatTokens([stores[source] for source in read_checked_json(place / COMPLETE)["sources"]])
        shared = shared_lengths(tokens) if self.share_prompt else None
        # The number of the chunk serves as that of the epoch: each chunk has its own order.
        plan = plan_epoch(
            tokens.lengths, self.plan, chunk, sequences_per_sample=tokens.sequences_per_sample, shared=shared
        )
        return Chunk(tokens, plan, [(store.name, bad) for store in stores for bad in store.bad()])


@dataclass(frozen=True)
class Chunk:
    tokens: ConcatTokens
    plan: Plan
    bad: Sequence[tuple[str, BadRecord]]
    """Records that are left out because they cannot be read, each with the option of its source."""


def chunk_name(chunk: int) -> str:
    return f"chunk_{chunk:06d}"


def split_buffer(buffer_size: int, shares: Sequence[float]) -> tuple[float, ...]:
    """Divide ``buffer_size`` records among the sources in proportion to ``shares``.

    Raises:
        ConfigError: if a source would get less than one record.
    """
    found = tuple(buffer_size * share / sum(shares) for share in shares)
    if min(found) < 1:
        raise ConfigError(
            f"data.buffer_size: less than one of {buffer_size} records is of "
            f"data.sources[{found.index(min(found))}], by its share; raise it."
        )
    return found
