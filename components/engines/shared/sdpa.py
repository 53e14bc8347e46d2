"""Causal attention by torch's ``scaled_dot_product_attention``, sequence by sequence."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_ROWS = {8: 128, 4: 128, 2: 256}
"""Queries at a time, by bytes of an element. torch's CPU kernel computes whole blocks of 512 keys, those
after a query too: of sequences of 40 to 800 tokens, forward and backward took 16 % less so."""


def packed_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Sequence[int],
    key_spans: Sequence[int] | None = None,
    **options: Any,
) -> Tensor:
    """One SDPA a sequence; see ``causal_sdpa`` for what it means where ``key_spans`` are longer."""
    key_spans = spans if key_spans is None else key_spans
    # Split, not sliced: the backward of a slice fills a whole tensor with zeros, once a sequence.
    cuts = ((query, spans), (key, key_spans), (value, key_spans))
    pieces = zip(*(tensor.split(list(lengths), dim=2) for tensor, lengths in cuts), strict=True)
    return torch.cat([causal_sdpa(*piece, **options) for piece in pieces], dim=1)


def causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scale: float | None, dropout: float
) -> Tensor:
    """``[B, heads, T, D]`` to ``[B, T, heads, D]``, every row one sequence.

    Where there are more keys than queries, the queries are the last tokens of the sequence.
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
    """Causal attention, ``rows`` queries at a time with the keys up to theirs."""
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
    """torch's; ``mask=None`` is causal."""
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
    """bool ``[T, keys]``: a token sees itself and what is before it, or the ``window - 1`` tokens before."""
    diagonal = num_keys - length
    mask = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(diagonal)
    return mask if window is None else mask.triu(diagonal + 1 - window)
