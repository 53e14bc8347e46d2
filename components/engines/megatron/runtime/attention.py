"""Core attention for mcore without transformer-engine: packed rows, sliding windows, context parallelism.

``components.engines.shared.varlen_attention`` computes the attention itself; this module divides it over
context-parallel ranks.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from components.contracts.device_copy import to_device
from components.contracts.json_types import Json
from components.engines.megatron.compat import packed_rope
from components.engines.megatron.runtime.attention_spans import AttentionSpans, full_spans, ring_spans
from components.engines.megatron.runtime.cp_sharding import CPShard
from components.engines.shared.sdpa import packed_sdpa
from components.engines.shared.ulysses import heads_to_seq, seq_to_heads
from components.engines.shared.varlen_attention import has_kernel, varlen_kernel

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def packed_seq_params(row: CPShard, device: torch.device | None = None) -> PackedSeqParams | None:
    """Return the packing information for mcore's rotary embedding and attention, or None for a padded row.

    The tensors of ``row`` are on the model's device, as ``CPShard.to`` leaves them.

    The boundaries stay on the CPU, where attention reads them without waiting for the GPU, unless ``device``
    is given: transformer-engine's kernels read them on the device. ``max_seqlen`` is the length of mcore's
    rotary table. mcore caches the tables of 32 lengths on the GPU. To limit their number, the longest span of
    the aligned row is rounded up to a power of two, unless transformer-engine's kernels read it.
    """
    if row.cu_seqlens is None:
        return None
    # A tensor of this pass, with which its rotary tables are freed; rows live until all passes have ended.
    ends = row.cu_seqlens.detach() if device is None else to_device(row.cu_seqlens, device)
    packed_rope.remember(ends, row.position_ids.reshape(-1))
    longest = row.max_seqlen
    if device is None and longest is not None:
        longest = 1 << (longest - 1).bit_length()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class CoreAttention(MegatronModule):
    """Causal attention of this tensor-parallel rank's heads, with mcore's interface of a core attention.

    Under context parallelism all ranks of the group call it together, each with the zig-zag share of
    ``cp_sharding.py``. ``cp_comm_type`` selects the communication:
        all_gather: each rank gathers all keys and values and computes its own queries.
        a2a: an all-to-all gives each rank all positions of a share of the heads, for which it computes whole
            sequences (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509). The number of query heads must be
            a multiple of cp; key-value heads are repeated if theirs is not.

    ``config.windows``, if set, is the attention window of each layer in tokens, including the current one.
    None means that a token attends to all previous tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,  # noqa: ARG002  taken from the tensors
        v_channels: int | None = None,  # noqa: ARG002
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type in CAUSAL, f"attention is causal, not {attn_mask_type}"
        assert attention_type == "self", f"{attention_type} attention is not computed here"
        assert config.softmax_type == "vanilla", f"softmax_type {config.softmax_type} is not computed here"
        assert config.window_size is None, "windows of our attention are config.windows, not window_size"
        assert not config.apply_query_key_layer_scaling, "apply_query_key_layer_scaling is not computed here"
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.group = groups.cp
        self.cp, self.rank = self.group.size(), self.group.rank()
        self.kind = cp_comm_type or config.cp_comm_type
        assert self.cp == 1 or self.kind in ("all_gather", "a2a"), f"cp_comm_type {self.kind}"
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windows = getattr(config, "windows", None)
        self.window = windows[layer_number - 1] if windows else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map ``[s, b, heads, D]`` to ``[s, b, heads * D]``; packed, ``[t, heads, D]`` to ``[t, heads * D]``.

        s and t count this rank's positions. key and value may have fewer heads, and value may have another D,
        which the result then has too. ``attention_mask`` must be None, since padding comes after all real
        tokens and causal attention does not reach it.
        """
        assert attention_mask is None, "pass no attention_mask: boundaries are those of packed_seq_params"
        assert attention_bias is None, "attention_bias is not computed here"
        assert attn_mask_type in (None, *CAUSAL), f"attention is causal, not {attn_mask_type}"
        if packed_seq_params is None:
            ends: tuple[int, ...] = (0, self.cp * len(query))
            return self.mix(query, key, value, ends).flatten(2)
        ends = tuple(packed_seq_params.cu_seqlens_q.tolist())
        assert ends[-1] == self.cp * len(query), f"sequences end at {ends[-1]}, not {self.cp * len(query)}"
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self.mix(query, key, value, ends).flatten(1)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, ends: tuple[int, ...]) -> Tensor:
        """Attend with communication over cp; inputs and output are this rank's share ``[s, b, heads, D]``."""
        if self.cp == 1:
            return self.attend(query, key, value, full_spans(ends, 1, query.device))
        if self.kind == "all_gather":
            pieces = ring_spans(ends, self.cp, self.rank, query.device)
            widths = [key.shape[-1], value.shape[-1]]
            key_value = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=self.group)
            key, value = key_value.index_select(0, pieces.order).split(widths, -1)
            return self.attend(query, key, value, pieces)
        pieces = full_spans(ends, self.cp, query.device)
        traded = seq_to_heads(query, key, value, self.group, heads=2, positions=0)
        query, key, value = (tensor.index_select(0, pieces.order) for tensor in traded)
        out = self.attend(query, key, value, pieces)
        out = out.index_select(0, pieces.order.argsort())
        return heads_to_seq(out, self.group, heads=2, positions=0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pieces: AttentionSpans) -> Tensor:
        """Attend without communication; tensors are ``[s, b, heads, D]``, keys in the order of ``pieces``."""
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        options: Json = {"scale": self.scale, "window": self.window}
        if len(q) == 1 and has_kernel(q, dropout):
            ends, longest = (pieces.cu_queries, pieces.cu_keys), (max(pieces.queries), max(pieces.keys))
            out = varlen_kernel(q, k, v, ends, longest, **options)
        else:
            with self.rng(dropout):
                out = packed_sdpa(q, k, v, pieces.queries, pieces.keys, dropout=dropout, **options)
        return out.transpose(0, 1).contiguous()

    def rng(self, dropout: float) -> AbstractContextManager[object]:
        """Return a context with a different random stream per tp rank, as in mcore's DotProductAttention.

        With sequence parallelism mcore has already switched to that stream for the whole block.
        """
        if not dropout or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()
