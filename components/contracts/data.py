"""Global batches, and what a sample is."""

from dataclasses import dataclass
from typing import Literal, Protocol

from components.contracts.batch import Batch

SampleKind = Literal["text", "chat", "preference", "unpaired"]
"""What one sample is: a document, a conversation, a pair of conversations that share a prompt, or a prompt
with one answer and whether it is desirable."""


@dataclass(frozen=True)
class BatchStats:
    """One global batch, known on every rank from the plan alone."""

    num_tokens: int
    """Non-padding input tokens of the samples."""
    num_computed_tokens: int
    """The same, with those that several sequences share counted once."""
    num_samples: int
    num_labels: int
    seqlen_mean: float
    seqlen_max: int
    sum_squared_seqlens: int
    """For the cost of attention: a sequence of L tokens behind a shared prefix of n adds (n + L)^2 - n^2."""


class DataLoader(Protocol):
    """Global batches as a pure function of the step: resuming needs the step and nothing else."""

    @property
    def num_steps(self) -> int:
        """Global batches of the whole run."""

    def microbatches(self, step: int) -> list[Batch]:
        """This rank's share of global batch ``step``: equally many on every rank, empty ones included."""

    def stats(self, step: int) -> BatchStats: ...

    def sample_ids(self, step: int) -> list[str]:
        """Where a user finds the samples of global batch ``step`` in the data: ``data.train:17``."""

    def epoch(self, step: int) -> float:
        """Passes over the data completed once ``step`` global batches are done."""
