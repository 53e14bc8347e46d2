"""Kinds of samples, and the loader of global batches."""

from dataclasses import dataclass
from typing import Literal, Protocol

from components.contracts.batch import Batch

SampleKind = Literal["text", "chat", "preference", "ranked", "unpaired"]
"""Kind of a sample: a document, a conversation, a pair of conversations with a common prompt, such a pair
with a margin, or a prompt with one answer that is labelled desirable or undesirable."""

PAIRS = ("preference", "ranked")
"""The kinds of samples that are pairs."""


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one global batch, which every rank computes from the plan without communication."""

    num_tokens: int
    """Number of non-padding input tokens. Tokens that several sequences share count for each of them."""
    num_computed_tokens: int
    """Number of non-padding input tokens. Tokens that several sequences share count once."""
    num_samples: int
    num_labels: int
    seqlen_mean: float
    seqlen_max: int
    sum_squared_seqlens: int
    """Sum over sequences of (n + L)^2 - n^2, for the cost of attention. L is the number of tokens after a
    shared prefix of n tokens."""


@dataclass(frozen=True)
class BatchShard:
    """The part of every global batch that one data-parallel rank gets, in micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size
        assert self.global_batch_size % (self.dp_size * self.micro_batch_size) == 0


class DataLoader(Protocol):
    """A loader of global batches, each determined by its step.

    The loader of a resumed stream also needs the position that ``advance`` returned.
    """

    @property
    def num_steps(self) -> int:
        """Number of global batches of the whole run."""

    def microbatches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of global batch ``step``.

        Every rank gets the same number of micro-batches, some of which may be empty.
        """

    def stats(self, step: int) -> BatchStats: ...

    def sample_ids(self, step: int) -> list[str]:
        """Return the ids of the samples of global batch ``step``, such as ``data.train:17``."""

    def largest_microbatch(self) -> tuple[int, int]:
        """Return the step and the index of the micro-batch with the most tokens in the first epoch.

        If the micro-batch belongs to another rank, the index counts the micro-batches of that rank. The
        result is the same on all ranks.
        """

    def epoch(self, step: int) -> float | None:
        """Return the number of passes over the data after ``step`` global batches. None means not known."""

    def advance(self, step: int) -> list[int]:
        """Declare that the first ``step`` global batches will not be needed again.

        Returns the position of ``step`` in a stream, from which a resumed run continues, or an empty list if
        the data is not a stream.
        """

    def close(self) -> None:
        """Stop the background process of the loader, if it has one."""
