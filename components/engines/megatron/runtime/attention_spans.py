"""The pairs of query and key spans that one context-parallel rank computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from components.contracts.device_copy import to_device
from components.engines.megatron.runtime.cp_sharding import zigzag_order


@dataclass(frozen=True)
class AttentionSpans:
    """Spans of the queries and of the keys of a row; query span i attends to key span i.

    The queries of a span are the last tokens of its keys: each attends to itself and to the keys before it.
    """

    queries: tuple[int, ...]
    """Length of every span, in tokens."""
    keys: tuple[int, ...]
    cu_queries: Tensor
    """Cumulative lengths for the kernel, int32 ``[spans + 1]`` on the device."""
    cu_keys: Tensor
    order: Tensor
    """Indices of the keys in the row in rank order, int64 ``[sum(keys)]`` on the device. It is empty if one
    rank holds the whole row."""


# Cached because all layers of a micro-batch and their recomputation use the same spans; a pipeline has
# several micro-batches in flight.
@lru_cache(maxsize=64)
def full_spans(ends: tuple[int, ...], cp: int, device: torch.device) -> AttentionSpans:
    """Return one span per sequence of the row; ``order`` is that of all tokens, or empty without cp.

    ``ends`` are the start of every sequence in the whole row and the end of the last one.
    """
    boundaries = torch.tensor(ends)
    spans = boundaries.diff().tolist()
    order = zigzag_order(boundaries, cp) if cp > 1 else boundaries[:0]
    return make_spans(spans, spans, to_device(order, device))


@lru_cache(maxsize=64)
def ring_spans(ends: tuple[int, ...], cp: int, rank: int, device: torch.device) -> AttentionSpans:
    """Return the two chunks of every sequence that ``rank`` holds, with all keys from the sequence's start.

    Chunk r attends to r + 1 chunks of keys and chunk 2cp - 1 - r to 2cp - r. In total every rank copies 2cp +
    1 chunks of keys, one more than the sequence has. No scores between sequences are computed.
    """
    order = zigzag_order(torch.tensor(ends), cp)
    queries, keys, parts = [], [], []
    for begin, end in pairwise(ends):
        size = (end - begin) // (2 * cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            queries.append(size)
            keys.append((chunk + 1) * size)
            parts.append(order[begin : begin + keys[-1]])
    return make_spans(queries, keys, to_device(torch.cat(parts), device))


def make_spans(queries: Sequence[int], keys: Sequence[int], order: Tensor) -> AttentionSpans:
    cu_queries, cu_keys = (
        to_device(torch.tensor([0, *accumulate(spans)], dtype=torch.int32), order.device)
        for spans in (queries, keys)
    )
    return AttentionSpans(tuple(queries), tuple(keys), cu_queries, cu_keys, order)
