"""Causal attention within every sequence of a batch, packed or padded, for any transformers model.

The engines run models with ``attn_implementation=ATTENTION`` and pass ``attention_kwargs(batch)`` to them.
Attention raises an error without sequence boundaries, because a default would let packed sequences silently
attend to each other.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.shared.sdpa import causal_sdpa, packed_sdpa
from components.engines.shared.ulysses import heads_to_seq, seq_to_heads

ATTENTION = "runner_varlen"
"""The value of ``attn_implementation`` for transformers."""

ATTENTION_RECOMPUTED = "runner_varlen_recomputed"
"""``attn_implementation`` of the same attention, recomputed in the backward pass."""

NO_MASK = torch.empty(1, 1, 0, 0)
"""An empty 4-D mask, which transformers passes on unchanged.

Without a mask, transformers would search ``position_ids`` for packed sequences in every forward pass, and the
host would wait for the result of a GPU.
"""

HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments that models pass to every attention layer and that do not change causal attention."""


HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether ``varlen_attn`` has the option ``enable_gqa``. torch 2.11 computes GQA without it, and 2.13
requires it."""


@dataclass
class SequenceSpans:
    """The lengths of the sequences of a packed row, in host memory.

    They are attributes of an object, because torch.compile would recompile a decoder block for every new list
    of numbers among its arguments.
    """

    queries: list[int]
    keys: list[int]
    """Number of keys of each sequence, including those of its prefix."""


def sequence_spans(here: Batch) -> SequenceSpans | None:
    """Return the sequence lengths of ``here``, a batch in host memory, or None if it is not packed."""
    if here.cu_seqlens is None:
        return None
    queries = here.cu_seqlens.diff()
    keys = queries if here.prefix_lengths is None else queries + here.prefix_lengths
    return SequenceSpans(queries.tolist(), keys.tolist())


def attention_kwargs(batch: Batch, spans: SequenceSpans | None) -> Json:
    """Return the arguments of ``model(...)`` besides input_ids, position_ids and ``use_cache=False``.

    With context parallelism, ``batch`` has the whole rows and the caller adds ``context_group``.
    ``spans`` is the result of ``sequence_spans`` for the same batch, computed once for all layers.
    """
    if batch.cu_seqlens is None:
        return {"attention_mask": NO_MASK, "padded": True}
    boundaries = {
        "attention_mask": NO_MASK,
        "cu_seq_lens_q": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "spans": spans,
    }
    if batch.prefix_lengths is None:
        return boundaries
    cu_seq_lens_k, key_index = keys_with_prefixes(batch)
    return boundaries | {"cu_seq_lens_k": cu_seq_lens_k, "key_index": key_index}


def keys_with_prefixes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the boundaries and the positions of the keys of every sequence.

    The keys are first the prefix, which is the beginning of the preceding sequence, then the sequence's own
    tokens. The host does not wait for the device.

    Returns:
        int32 ``[S + 1]``, the boundaries of the concatenated keys of all sequences; and int64 ``[num_keys]``,
        the position of each key in the row.
    """
    assert batch.cu_seqlens is not None
    assert batch.prefix_lengths is not None
    begin, prefix = batch.cu_seqlens[:-1], batch.prefix_lengths
    ends = F.pad((batch.cu_seqlens.diff() + prefix).cumsum(0, dtype=torch.int32), (1, 0))
    sequences = torch.arange(len(prefix), device=prefix.device)
    sequence = sequences.repeat_interleave(ends.diff(), output_size=batch.num_keys)
    offset = torch.arange(len(sequence), device=prefix.device) - ends[sequence]
    own = begin[sequence] + offset - prefix[sequence]
    shared = begin[sequence - 1] + offset
    return ends, torch.where(offset < prefix[sequence], shared, own)


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
    cu_seq_lens_k: Tensor | None = None,
    key_index: Tensor | None = None,
    spans: SequenceSpans | None = None,
    padded: bool = False,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within sequences, through transformers' attention interface.

    Args:
        query: ``[B, heads, T, D]``; key and value may have fewer heads (grouped-query attention), and value
            may have another D, which the result then has too.
        attention_mask: must be None or ``NO_MASK``; padding is on the right, so that no token attends to it.
        scaling: factor by which the scores are multiplied. None means ``D ** -0.5``.
        sliding_window: maximum number of tokens, including itself, that a token attends to. None means no
            maximum.
        cu_seq_lens_q: int32 ``[S + 1]``, the boundaries of the sequences of a packed batch (B = 1), given
            with ``max_length_q`` and ``spans``.
        cu_seq_lens_k: boundaries of the keys, given with ``key_index`` if sequences attend to prefixes; see
            ``keys_with_prefixes``. ``max_length_q`` is also the maximum number of keys of a sequence.
        spans: the lengths of ``cu_seq_lens_q`` and of the keys, in host memory.
        padded: whether each row is one sequence.

    Returns:
        ``([B, T, heads, D], None)``

    Raises:
        ConfigError: if the attention of the model is not causal, has an unsupported feature, or does not get
            the boundaries that the engine passes to the model.
    """
    check_attention_arguments(module, is_causal, others)
    assert attention_mask is None or not attention_mask.numel(), (
        "pass no attention_mask: boundaries are cu_seq_lens_q or padded=True"
    )
    options: Json = {"scale": scaling, "window": sliding_window}
    if padded:
        assert cu_seq_lens_q is None, "padded=True and cu_seq_lens_q contradict each other"
        return causal_sdpa(query, key, value, dropout=dropout, **options), None
    if cu_seq_lens_q is None:  # for example nemotron, whose blocks pass no further arguments to attention
        raise ConfigError(
            f"model: its blocks do not pass the ends of sequences on to {type(module).__name__}, "
            "so packed sequences would attend to each other; choose another model."
        )
    assert max_length_q is not None, "cu_seq_lens_q comes with max_length_q"
    assert query.shape[0] == 1, f"a packed batch is one row, got {query.shape[0]}"
    assert spans is not None, "cu_seq_lens_q comes with spans"
    if key_index is not None:
        key, value = key.index_select(2, key_index), value.index_select(2, key_index)
    ends = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
    if has_kernel(query, dropout):
        return varlen_kernel(query, key, value, ends, (max_length_q, max_length_q), **options), None
    return packed_sdpa(query, key, value, spans.queries, spans.keys, dropout=dropout, **options), None


def recomputed(module: nn.Module, *tensors: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """Compute ``attention``, saving only query, key, value and the dropout state for the backward pass."""
    if not torch.is_grad_enabled():
        return attention(module, *tensors, **options)  # type: ignore[arg-type]
    return checkpoint(attention, module, *tensors, use_reentrant=False, **options)


def dispatch(
    attend: Callable[..., tuple[Tensor, None]],
    module: nn.Module,
    query: Tensor,
    *tensors: Tensor | None,
    context_group: dist.ProcessGroup | None = None,
    dropout: float = 0.0,
    padded: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call ``attend`` on whole rows; with ``context_group`` each rank passes and gets its share of positions.

    torch.compile traces ``attend`` only if it is the kernel for packed rows; the decoder block is then one
    graph.
    """
    options |= {"dropout": dropout, "padded": padded}
    if attend is attention and context_group is None and not padded and has_kernel(query, dropout):
        return attend(module, query, *tensors, **options)
    return untraced(attend, context_group, module, query, *tensors, **options)


# Sequence lengths are Python numbers, so that torch.compile would recompile for every batch.
@torch.compiler.disable
def untraced(
    attend: Callable[..., tuple[Tensor, None]],
    context_group: dist.ProcessGroup | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Call ``attend``, between the two all-to-alls of Ulysses if there is a ``context_group``.

    The activations that ``attend`` saves have whole rows and a share of the heads. So recomputing ``attend``
    needs no communication.
    """
    if context_group is None:
        return attend(module, query, key, value, *others, **options)
    traded = seq_to_heads(query, key, value, context_group, heads=1, positions=2)
    out, _ = attend(module, *traded, *others, **options)
    return heads_to_seq(out, context_group, heads=2, positions=1), None


def check_attention_arguments(module: nn.Module, is_causal: bool | None, others: dict[str, object]) -> None:
    """Raise ConfigError if attention is not causal, or the model passes an argument that would be ignored."""
    kind = type(module).__name__
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"model: {kind} attends to later tokens; choose a causal language model.")
    for name, argument in others.items():
        if name not in HARMLESS and argument is not None:
            raise ConfigError(
                f"model: {kind} needs {name} in its attention, which the engines do not support."
            )


def has_kernel(query: Tensor, dropout: float) -> bool:
    """Return whether ``varlen_kernel`` can be used.

    Its CUDA kernel needs half precision, compute capability 8.0 or above, and a head dimension that is a
    multiple of 8 and at most 256. It has no dropout.
    """
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or dropout:
        return False
    width = query.shape[-1]
    return width % 8 == 0 and width <= 256 and is_ampere(query.device)


@torch.compiler.assume_constant_result
def is_ampere(device: torch.device) -> bool:
    """Return whether the GPU is of the Ampere generation or a later one."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    max_seqlens: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute ``packed_sdpa`` for all sequences in one CUDA kernel.

    ``cu_seqlens`` and ``max_seqlens`` each have one entry for the queries and one for the keys.
    The kernel needs the same head dimension for keys and values: narrower values are padded with zeros, and
    the padding of the result is cut off.
    """
    missing = key.shape[-1] - value.shape[-1]
    if missing:
        value = F.pad(value, (0, missing))
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    options: Json = {"enable_gqa": True} if HAS_ENABLE_GQA and q.shape[1] != k.shape[1] else {}
    # Window (left, right) around every token: (-1, 0) is plain causal.
    size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, *cu_seqlens, *max_seqlens, scale=scale, window_size=size, **options)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)[..., :-missing] if missing else out.unsqueeze(0)


def no_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> None:
    """Raise AssertionError if the caller of the model passed a mask.

    Without this function, transformers would silently drop the mask.
    """
    assert attention_mask is None, "pass no attention_mask: boundaries are cu_seq_lens_q or padded=True"


for name, function in ((ATTENTION, attention), (ATTENTION_RECOMPUTED, recomputed)):
    AttentionInterface.register(name, partial(dispatch, function))
    AttentionMaskInterface.register(name, no_mask)
