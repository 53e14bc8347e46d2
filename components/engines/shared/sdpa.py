"""Causal attention with torch's ``scaled_dot_product_attention``, one call per sequence."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_ROWS = {8: 128, 4: 128, 2: 256}
"""Number of queries per call on a CPU, by bytes per element. torch's CPU kernel computes blocks of 64 queries
(256 from 768 queries on) and 512 keys; it skips blocks of keys after the last query of its block only. In
fp32, forward and backward of 300 to 600 tokens took 16 to 20 % less time with fewer queries per call."""

CPU_WHOLE = {8: 768, 4: 768, 2: 0}
"""Minimum length of a sequence that is computed in one call on a CPU if it needs no mask except the causal
one, by bytes per element. A mask that is a tensor takes longer, above all in half precision: on a Xeon with
AMX, with 6 heads of width 64, 384, 640 and 1024 tokens took 9, 18 and 31 ms in bf16, and with 256 queries per
call 10, 22 and 39 ms. In fp32, 2048 tokens took 113 ms, and 133 ms with 128 queries per call."""


def packed_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[int],
    key_spans: Sequence[int] | None = None,
    *,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> Tensor:
    """Compute causal attention for a packed row, with one call of ``causal_sdpa`` per sequence.

    The shapes are those of ``causal_sdpa`` with B = 1; the sequences follow one another in the dimension T.
    ``spans`` and ``key_spans`` are the numbers of queries and keys of each sequence. If ``key_spans`` is
    None, there are as many keys as queries.
    """
    key_spans = spans if key_spans is None else key_spans
    # Split, not sliced: the backward of each slice would fill a whole tensor with zeros.
    cuts = ((query, spans), (key, key_spans), (value, key_spans))
    pieces = zip(*(tensor.split(list(lengths), dim=2) for tensor, lengths in cuts), strict=True)
    out = [causal_sdpa(*piece, window=window, scale=scale, dropout=dropout) for piece in pieces]
    return torch.cat(out, dim=1)


def causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None, dropout: float
) -> Tensor:
    """Compute causal attention, ``[B, heads, T, D]`` -> ``[B, T, heads, D]``, one sequence per row.

    If there are more keys than queries, the queries are the last tokens of the sequence. ``key`` and
    ``value`` may have fewer heads (GQA). On the CPU, ``queries_per_call`` queries at a time are computed,
    with the keys that at least one of them attends to. On a GPU, keys and values are repeated for GQA:
    torch's memory-efficient kernel, which is used for fp32, does not support GQA, and the fallback saves
    ``[heads, T, T]``.

    Autograd saves the mask of every call. These masks are views of one tensor ``[rows, keys]``, so that for
    fixed ``rows`` memory grows with T and not with its square.
    """
    length = query.shape[2]
    if not query.is_cpu and query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    rows = length
    if query.is_cpu:
        has_kernel = not dropout and query.shape[3] == value.shape[3]
        may_be_whole = has_kernel and not needs_mask(length, key.shape[2], window)
        rows = queries_per_call(length, query.element_size(), may_be_whole=may_be_whole)
    out, position, mask = [], key.shape[2] - length, None
    for some in query.split(rows, dim=2):
        first = 0 if window is None else max(0, position + 1 - window)
        position += (count := some.shape[2])
        keys, values = (tensor[:, :, first:position] for tensor in (key, value))
        num_keys, part = position - first, None
        if needs_mask(count, num_keys, window):
            if mask is None:
                mask = additive_mask(rows, key.shape[2], window, query)
            part = mask[rows - count :, mask.shape[1] - num_keys :]
        attended = F.scaled_dot_product_attention(
            some,
            keys,
            values,
            attn_mask=part,
            is_causal=part is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out.append(attended)
    return (out[0] if len(out) == 1 else torch.cat(out, dim=2)).transpose(1, 2)


def needs_mask(queries: int, keys: int, window: int | None) -> bool:
    """Return whether attention needs a mask tensor, because the kernel's own causal mask does not suffice.

    The queries are those of the last tokens. Each attends to at most ``window`` keys, including its own.
    """
    return keys > queries or (window is not None and window < queries)


def queries_per_call(length: int, element_size: int, *, may_be_whole: bool) -> int:
    """Return how many of the ``length`` queries of a sequence are computed at a time on a CPU.

    ``may_be_whole`` is whether the sequence needs no mask except the causal one, and torch has a kernel for
    it.
    """
    if may_be_whole and length >= CPU_WHOLE[element_size]:
        return length
    return min(length, CPU_ROWS[element_size])


def additive_mask(rows: int, num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """Return the mask of a sequence's last ``rows`` tokens for the keys that any of them attends to.

    It is 0 if the token attends to the key, that is to itself and all keys before it, or with ``window`` to
    itself and the last ``window - 1`` keys before it. Otherwise it is -inf. Its dtype and device are those of
    ``like``.
    """
    width = num_keys if window is None else min(num_keys, window - 1 + rows)
    ones = torch.ones(rows, width, dtype=torch.bool, device=like.device)
    after = ones.triu(width - rows + 1)
    hidden = after if window is None else after | ones.tril(width - rows - window)
    return torch.zeros(rows, width, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
