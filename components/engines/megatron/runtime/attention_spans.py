"""Which queries meet which keys, on one context-parallel rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from components.engines.megatron.runtime.cp_sharding import zigzag_order


@dataclass(frozen=True)
class AttentionSpans:
    """Queries and keys of a row, cut so that piece i of the queries meets piece i of the keys.

    The queries of a piece are the last tokens of its keys: each sees itself and the keys before it.
    """

    queries: tuple[int, ...]
    """Length of every piece."""
    keys: tuple[int, ...]
    cu_queries: Tensor
    """int32 ``[pieces + 1]`` on the device, for the kernel."""
    cu_keys: Tensor
    order: Tensor
    """int64 ``[sum(keys)]`` on the device: where the keys lie in the row in rank order."""


# Kept because all layers of a micro-batch ask for the same pieces, and recomputation asks again; a pipeline
# has several micro-batches under way.
@lru_cache(maxsize=64)
def full_spans(ends: tuple[int, ...], cp: int, device: torch.device) -> AttentionSpans:
    """Every sequence of the row, whole; ``order`` is that of all tokens.

    ``ends``: where every sequence begins in the whole row, and the end of the last.
    """
    boundaries = torch.tensor(ends)
    spans = boundaries.diff().tolist()
    return make_spans(spans, spans, zigzag_order(boundaries, cp), device)


@lru_cache(maxsize=64)
def ring_spans(ends: tuple[int, ...], cp: int, rank: int, device: torch.device) -> AttentionSpans:
    """The two chunks that ``rank`` holds of every sequence, each with the keys since its sequence began.

    Chunk r meets r + 1 chunks of keys and chunk 2cp - 1 - r meets 2cp - r: on every rank 2cp + 1 together,
    hardly more than the sequence, so keys are copied once and no score of another sequence is computed.
    """
    order = zigzag_order(torch.tensor(ends), cp)
    queries, keys, parts = [], [], []
    for begin, end in pairwise(ends):
        size = (end - begin) // (2 * cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            queries.append(size)
            keys.append((chunk + 1) * size)
            parts.append(order[begin : begin + keys[-1]])
    return make_spans(queries, keys, torch.cat(parts), device)


def make_spans(
    queries: Sequence[int], keys: Sequence[int], order: Tensor, device: torch.device
) -> AttentionSpans:
    cu_queries, cu_keys = (
        torch.tensor([0, *accumulate(spans)], dtype=torch.int32, device=device) for spans in (queries, keys)
    )
    return AttentionSpans(tuple(queries), tuple(keys), cu_queries, cu_keys, order.to(device))
