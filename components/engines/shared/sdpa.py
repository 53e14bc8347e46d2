"""Causal attention with torch's ``scaled_dot_product_attention``, one call per sequence."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_ROWS = {8: 128, 4: 128, 2: 256}
"""Number of queries per call, by bytes per element. torch's CPU kernel computes whole blocks of 512 keys,
including those after the query. For sequences of 40 to 800 tokens, forward and backward took 16 % less time
in chunks."""


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
    """Run one SDPA per sequence; see ``causal_sdpa`` for ``key_spans`` longer than ``spans``."""
    key_spans = spans if key_spans is None else key_spans
    # Split, not sliced: the backward of each slice would fill a whole tensor with zeros.
    cuts = ((query, spans), (key, key_spans), (value, key_spans))
    pieces = zip(*(tensor.split(list(lengths), dim=2) for tensor, lengths in cuts), strict=True)
    out = [causal_sdpa(*piece, window=window, scale=scale, dropout=dropout) for piece in pieces]
    return torch.cat(out, dim=1)


def causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None, dropout: float
) -> Tensor:
    """Compute ``[B, heads, T, D]`` -> ``[B, T, heads, D]``, with one sequence per row.

    If there are more keys than queries, the queries are the last tokens of the sequence.
    """
    length, num_keys = query.shape[2], key.shape[2]
    if num_keys > length or (window is not None and window < length):
        out = sdpa(
            query,
            key,
            value,
            causal_mask(length, num_keys, window, query.device),
            scale=scale,
            dropout=dropout,
        )
    elif query.is_cpu and length > (rows := CPU_ROWS[query.element_size()]):
        out = by_rows(query, key, value, rows, scale=scale, dropout=dropout)
    else:
        out = sdpa(query, key, value, None, scale=scale, dropout=dropout)
    return out.transpose(1, 2)


def by_rows(
    query: Tensor, key: Tensor, value: Tensor, rows: int, *, scale: float | None, dropout: float
) -> Tensor:
    """Compute causal attention for ``rows`` queries at a time, with the keys up to the last of them."""
    out, begin = [], 0
    for some in query.split(rows, dim=2):
        end = begin + some.shape[2]
        mask = causal_mask(end - begin, end, None, query.device) if begin else None
        out.append(sdpa(some, key[:, :, :end], value[:, :, :end], mask, scale=scale, dropout=dropout))
        begin = end
    return torch.cat(out, dim=2)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None, dropout: float
) -> Tensor:
    """Call torch's SDPA on tensors ``[B, heads, T, D]``, with fewer key-value heads for GQA.

    ``mask`` is bool ``[T, keys]``, True for keys to attend to. None means causal attention.
    """
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def causal_mask(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask, bool ``[T, keys]``, of each token and those before it, or ``window - 1`` of them."""
    diagonal = num_keys - length
    mask = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(diagonal)
    return mask if window is None else mask.triu(diagonal + 1 - window)
