"""The part of the vocabulary that the logits of a rank cover, and reductions over the ranks.

Statistics over a whole vocabulary are a maximum, then sums: with shards ``z_r`` of the logits ``z``
    max z = max_r max z_r        sum exp(z - max z) = sum_r sum exp(z_r - max z)
so a shard computes the same as a whole vocabulary, with an all-reduce after each of the two steps.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.shared.torch_private import assert_async


@dataclass(frozen=True)
class FullVocabulary:
    """A vocabulary whose head is entirely on this rank, which needs no reductions over ranks."""

    size: int
    start = 0

    @property
    def typical_rows(self) -> int:
        """Number of rows of the head for planning memory, the same on every rank."""
        return self.size

    def reduce_max(self, largest: Tensor) -> Tensor:
        """Turn the maximum over the rows of this rank, ``[tokens]``, into that over the vocabulary."""
        return largest

    def reduce(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turn sums over the rows of this rank, each ``[tokens]``, into sums over the vocabulary."""
        return parts

    def select_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the logit of each target, ``[tokens]``, or 0 if another rank holds the target's row."""
        return logits.gather(1, targets[:, None])[:, 0]

    def add_to_targets_(self, logits: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add ``values [tokens]`` to the logits of ``targets``, in place."""
        logits.scatter_add_(1, targets[:, None], values[:, None])


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the head, with a vocabulary split over ``group``.

    Each row is on exactly one rank. The shards may have any order and any sizes, including 0.
    """

    group: dist.ProcessGroup
    start: int
    """The token id of the first row."""
    size: int
    """Size of the whole vocabulary without padded rows."""

    @property
    def typical_rows(self) -> int:
        return math.ceil(self.size / self.group.size())

    def reduce_max(self, largest: Tensor) -> Tensor:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest

    def reduce(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stacked = torch.stack(parts)
        dist.all_reduce(stacked, group=self.group)
        return stacked.unbind()

    def select_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows = logits.shape[1]
        assert not rows or self.start + rows <= self.size, "a padded row of the head takes part"
        # No rank has the logit of a label outside of the vocabulary, which would be taken as 0. The host does
        # not wait for this check.
        assert_async(((targets >= 0) & (targets < self.size)).all(), "a label is not in the vocabulary")
        column, here = self.locate(logits, targets)
        return logits.gather(1, column).where(here, 0).sum(-1)

    def add_to_targets_(self, logits: Tensor, targets: Tensor, values: Tensor) -> None:
        column, here = self.locate(logits, targets)
        logits.scatter_add_(1, column, values[:, None].where(here, 0))

    def locate(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(column, here)``, both ``[tokens, 1]``, or ``[tokens, 0]`` if this rank has no row.

        ``here`` is whether the target is a row of this rank; otherwise ``column`` is an arbitrary valid one.
        """
        rows = logits.shape[1]
        local = (targets - self.start)[:, None][:, :rows]
        here = (local >= 0) & (local < rows)
        return local.where(here, 0), here


Vocabulary = FullVocabulary | VocabularyShard
