"""Causal attention within every sequence of a batch, packed or padded, for any transformers model.

The engines run models with ``attn_implementation=ATTENTION`` and pass ``attention_kwargs(batch)`` to them.
Nothing is guessed: without sequence boundaries attention refuses to run, since a guess would let packed
sequences see each other without a word.
"""

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

from runner.errors import ConfigError
from runner.protocols import Batch

ATTENTION = "runner_varlen"
"""The name to give transformers as ``attn_implementation``."""

HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""What models pass down to every attention layer and what does not change causal attention."""


def attention_kwargs(batch: Batch) -> dict[str, Any]:
    """What to pass to ``model(...)`` beside input_ids, position_ids and ``use_cache=False``."""
    if batch.cu_seqlens is None:
        return {"padded": True}
    return {"cu_seq_lens_q": batch.cu_seqlens, "max_length_q": batch.max_seqlen}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    padded: bool = False,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: ``[B, heads, T, D]``; key and value may have fewer heads (each serves a group of them).
        attention_mask: must be None; padding is on the right, where no token can look.
        scaling: of the scores; None is ``D ** -0.5``.
        sliding_window: how many tokens, itself included, a token sees.
        cu_seq_lens_q: int32 ``[S + 1]`` with ``max_length_q``, for a packed batch (B = 1).
        padded: one sequence a row.

    Returns:
        ``([B, T, heads, D], None)``

    Raises:
        ConfigError: the model's attention is not causal, or has a feature that is not computed here.
    """
    refuse(module, is_causal, others)
    assert attention_mask is None, "pass no attention_mask: boundaries are cu_seq_lens_q or padded=True"
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window}
    if padded:
        assert cu_seq_lens_q is None, "padded=True and cu_seq_lens_q contradict each other"
        return causal_sdpa(query, key, value, dropout=dropout, **options), None
    assert cu_seq_lens_q is not None, (
        "no sequence boundaries: pass cu_seq_lens_q and max_length_q, or padded=True"
    )
    assert max_length_q is not None, "cu_seq_lens_q comes with max_length_q"
    assert query.shape[0] == 1, f"a packed batch is one row, got {query.shape[0]}"
    # The CUDA kernel takes half precision only and has no dropout.
    if query.is_cuda and query.dtype != torch.float32 and not dropout:
        return varlen(query, key, value, cu_seq_lens_q, max_length_q, **options), None
    return packed_sdpa(query, key, value, cu_seq_lens_q, dropout=dropout, **options), None


def refuse(module: nn.Module, is_causal: bool | None, others: dict[str, Any]) -> None:
    """Raises where the model asks for something that would be left out of the result."""
    kind = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"model: {kind} attends to later tokens; choose a causal language model.")
    for name, argument in others.items():
        if name not in HARMLESS and argument is not None:
            raise ConfigError(
                f"model: {kind} needs {name} in its attention, which our engines do not compute."
            )


def packed_sdpa(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: Any) -> Tensor:
    """One SDPA a sequence."""
    spans = cu_seqlens.diff().tolist()
    # Split, not sliced: the backward of a slice fills a whole tensor with zeros, once a sequence.
    pieces = zip(*(tensor.split(spans, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([causal_sdpa(*piece, **options) for piece in pieces], dim=1)


def causal_sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """``[B, heads, T, D]`` to ``[B, T, heads, D]``, every row one sequence."""
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        mask = window_mask(length, window, query.device)
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool ``[T, T]``: row t sees t and the ``window - 1`` tokens before it."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """All sequences in one CUDA kernel."""
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    options: dict[str, Any] = {"enable_gqa": True} if takes_enable_gqa() and q.shape[1] != k.shape[1] else {}
    # Window (left, right) around every token: (-1, 0) is plain causal.
    size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=size, **options
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


@cache
def takes_enable_gqa() -> bool:
    """torch 2.11 groups heads without being told; 2.13 wants to be told."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """transformers' mask interface: without one of our own it drops the caller's mask without a word."""
    assert attention_mask is None, "pass no attention_mask: boundaries are cu_seq_lens_q or padded=True"


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, no_mask)
