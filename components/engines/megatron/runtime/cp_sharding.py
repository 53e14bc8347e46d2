"""The share of a micro-batch that one context-parallel rank computes.

Context parallelism gives every rank a zig-zag share: a sequence is cut into ``2 * cp`` chunks and rank r
holds chunks r and ``2 * cp - 1 - r``, so that causal attention costs every rank the same. Packed sequences
are cut one by one, padded rows as a whole. So positions have two orders here: that of the whole row, and that
of the row in rank order, which is the concatenation of the shares of ranks 0, 1, ...
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.device_copy import to_device
from components.contracts.json_types import Json
from components.engines.shared.ulysses import AllGatherShards, rank_slice


@dataclass(frozen=True)
class CPShard:
    """This rank's share of ``B`` aligned rows of length ``cp * L``, made from a micro-batch ``[B, T]``."""

    input_ids: Tensor
    """int64 ``[B, L]``; 0 on padding."""
    labels: Tensor
    """int64 ``[B, L]``; ``IGNORE`` on padding."""
    position_ids: Tensor
    """int64 ``[B, L]``; 0 on padding."""
    cu_seqlens: Tensor | None
    """int32 ``[S' + 1]``: the sequence boundaries of the whole aligned row, in which padding at the end
    counts as one more sequence. The tensor stays on the CPU, where it is read. None means that rows are
    padded."""
    max_seqlen: int | None
    """Length of the longest span of ``cu_seqlens`` in tokens. None means that rows are padded."""
    index: Tensor
    """int64 ``[B, T]``: for each position of the micro-batch, its index in the row in rank order."""
    cp: int
    rank: int
    label_index: Tensor | None = None
    """int64 ``[n]``: the positions in ``labels.reshape(-1)`` that have a label, set by ``to``."""

    def to(self, device: torch.device) -> Self:
        """Return this share with every tensor except ``cu_seqlens`` on ``device``.

        Positions with a label are found on the host before the copy, because finding them on a device would
        make the host wait.
        """
        found = replace(self, label_index=(self.labels.reshape(-1) != IGNORE).nonzero()[:, 0])
        tensors = {name: value for name, value in vars(found).items() if isinstance(value, Tensor)}
        moved: Json = {k: to_device(v, device) for k, v in tensors.items() if k != "cu_seqlens"}
        return replace(self, **moved)

    def scatter(self, values: Tensor, fill: float = 0) -> Tensor:
        """Return this rank's share ``[B, L]`` of ``values`` ``[B, T]``, with ``fill`` on padding."""
        length = self.cp * self.input_ids.shape[1]
        return share(values, self.index, length, fill, cp=self.cp, rank=self.rank)


def aligned_length(batch: Batch, *, cp: int, multiple: int) -> int:
    """Return the length of the whole aligned row, a multiple of ``multiple``.

    Each sequence (packed) or the row (padded) is aligned such that ``cp`` ranks can split it.
    """
    step = math.lcm(multiple, alignment(cp))
    if batch.cu_seqlens is None:
        return round_up(batch.input_ids.shape[1], step)
    spans = batch.cu_seqlens.diff().tolist()
    return round_up(sum(round_up(span, alignment(cp)) for span in spans), step)


def shard_batch(batch: Batch, *, cp: int, rank: int, multiple: int, length: int | None = None) -> CPShard:
    """Return the share of ``rank``; every rank of ``cp`` must pass the same ``batch``, which is on the CPU.

    Args:
        multiple: number that must divide the length of the whole row.
        length: length of the whole row, the same for all rows of a pipeline call. It must be at least
            ``aligned_length``, and a multiple of ``multiple`` and ``alignment(cp)``. None means
            ``aligned_length``.
    """
    assert batch.prefix_lengths is None, "every sequence stands alone in a row"
    needed = aligned_length(batch, cp=cp, multiple=multiple)
    length = needed if length is None else length
    step = math.lcm(multiple, alignment(cp))
    assert length >= needed, f"a row of {needed} does not fit into {length}"
    assert length % step == 0, f"a row of {length} is no multiple of {step}"
    ends = aligned_boundaries(batch, cp, length)
    index = row_index(batch, ends, cp).expand_as(batch.labels)

    own = partial(share, index=index, length=length, cp=cp, rank=rank)
    packed = batch.cu_seqlens is not None
    return CPShard(
        input_ids=own(batch.input_ids, fill=0),
        labels=own(batch.labels, fill=IGNORE),
        position_ids=own(batch.position_ids, fill=0),
        cu_seqlens=ends.int() if packed else None,
        max_seqlen=int(ends.diff().max()) if packed else None,
        index=index,
        cp=cp,
        rank=rank,
    )


def share(values: Tensor, index: Tensor, length: int, fill: float, *, cp: int, rank: int) -> Tensor:
    """Return the part ``[B, L]`` of ``values`` ``[B, T]`` that ``rank`` holds, with ``fill`` on padding.

    If there is one rank and no padding, the result is ``values`` itself, which may be in pinned memory.
    """
    if cp == 1 and length == values.shape[1]:
        return values
    whole = values.new_full((len(values), length), fill)
    return rank_slice(whole.scatter(1, index, values), cp, rank)


def gather_shards(values: Tensor, row: CPShard, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the shares ``[B, L]`` into ``[B, T]``, shaped like ``Batch.labels``, on every rank.

    Collective over ``group``, the ranks of ``cp``; None is allowed if cp is 1. The result is differentiable
    if every rank computes the same function of it: see ``AllGatherShards``.
    """
    if row.cp > 1:
        assert group is not None, "a row cut by context parallelism is gathered over its group"
        values = AllGatherShards.apply(values, group)
    return values.gather(1, row.index)


def alignment(cp: int) -> int:
    """Return the number that must divide the length of a sequence for ``cp`` ranks to split it."""
    return 2 * cp if cp > 1 else 1


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def aligned_boundaries(batch: Batch, cp: int, length: int) -> Tensor:
    """Return int64 ``[S' + 1]``: the starts of the sequences of the whole aligned row, and its end."""
    if batch.cu_seqlens is None:
        return torch.tensor([0, length])
    spans = [round_up(span, alignment(cp)) for span in batch.cu_seqlens.diff().tolist()]
    padding = length - sum(spans)
    return F.pad(torch.tensor([*spans, padding] if padding else spans).cumsum(0), (1, 0))


def row_index(batch: Batch, ends: Tensor, cp: int) -> Tensor:
    """Return int64 ``[T]``: the index of each position t of the micro-batch in the row in rank order."""
    if cp == 1:  # sequences are not aligned: the same row, perhaps with padding at its end
        return torch.arange(batch.labels.shape[1])
    return zigzag_order(ends, cp)[aligned_positions(batch, ends)]


def aligned_positions(batch: Batch, ends: Tensor) -> Tensor:
    """Return int64 ``[T]``: the index of each position t of the micro-batch in the whole aligned row."""
    position = torch.arange(batch.labels.shape[1])
    if batch.cu_seqlens is None:
        return position
    begin = batch.cu_seqlens[:-1].long()
    return position + (ends[: len(begin)] - begin)[batch.sequence_ids()[0]]


def zigzag_order(ends: Tensor, cp: int) -> Tensor:
    """Return int64 ``[W]``: the index of every position of the whole row in the row in rank order.

    ``ends`` is int64 ``[S' + 1]``; every span must be a multiple of ``2 * cp``, with ``cp`` above 1.
    """
    length = int(ends[-1])
    position = torch.arange(length)
    spans = ends.diff()
    begin = ends[:-1].repeat_interleave(spans)
    size = (spans // (2 * cp)).repeat_interleave(spans)
    chunk = (position - begin) // size
    rank = torch.minimum(chunk, 2 * cp - 1 - chunk)
    return rank * (length // cp) + begin // cp + (chunk >= cp) * size + (position - begin) % size
