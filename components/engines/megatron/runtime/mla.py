"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) in mcore's layers.

mcore's own implementation needs transformer-engine. Without transformer-engine, it splits the latents over
tensor-parallel ranks. It also does not sum the ranks' gradients of the rotary part of the keys, which all
heads share.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents in transformers, independent of ``rms_norm_eps``."""


class WholeLinear(nn.Module):
    """A matrix ``[out, in]`` replicated over tensor-parallel ranks, with the interface of the split layers.

    Each rank computes the positions that it holds: all of them, or with sequence parallelism its own share,
    in which case ``finalize_model_grads`` sums the gradients.
    """

    def __init__(
        self, inputs: int, outputs: int, config: MLATransformerConfig, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=config.params_dtype))
        self.tp_group, self.sequence_parallel = group, config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Map ``[s, b, in]`` to ``[s, b, out]``; the None is in place of a bias to be added."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MultiLatentAttention):
    """Attention whose latents are replicated over tensor-parallel ranks.

    ``config.rotary`` describes the rotary embedding of queries and keys.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", cp_comm_type, groups)
        heads, latent = config.num_attention_heads, config.kv_lora_rank
        query = heads * self.q_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = self._up(config.hidden_size, query)
        else:
            self.linear_q_down_proj = self._down(config.q_lora_rank)
            self.q_a_layernorm = WrappedTorchNorm(config, config.q_lora_rank, NORM_EPSILON)
            self.linear_q_up_proj = self._up(config.q_lora_rank, query)
        self.linear_kv_down_proj = self._down(latent + config.qk_pos_emb_head_dim)
        self.kv_a_layernorm = WrappedTorchNorm(config, latent, NORM_EPSILON)
        self.linear_kv_up_proj = self._up(latent, heads * (config.qk_head_dim + config.v_head_dim))
        self.rotary_pos_emb.inv_freq = config.rotary.frequencies.to(torch.cuda.current_device())

    def _down(self, outputs: int) -> WholeLinear:
        return WholeLinear(self.config.hidden_size, outputs, self.config, self.pg_collection.tp)

    def _up(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """Build a projection to the heads of this rank, for all positions even with sequence parallelism."""
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: Tensor | None = None,  # noqa: ARG002  every sequence starts at 0
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: None = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return this rank's q, k, v, ``[s, b, heads, D]`` or packed ``[t, heads, D]``, and None twice."""
        assert key_value_states is None
        assert inference_context is None
        config = self.config
        query = self._query(hidden_states).unflatten(-1, (-1, self.q_head_dim))
        latent, shared = self.linear_kv_down_proj(hidden_states)[0].split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        key_value = self.linear_kv_up_proj(self.kv_a_layernorm(latent))[0]
        key_value = key_value.unflatten(-1, (-1, config.qk_head_dim + config.v_head_dim))
        shared = self._shared(shared).unsqueeze(-2)
        if packed_seq_params is not None:
            query, key_value, shared = (tensor.squeeze(1) for tensor in (query, key_value, shared))
        query, turned = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], -1)
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden_states, config, packed_seq_params)
        freqs = self.rotary_pos_emb(length, packed_seq=packed_seq_params is not None)
        turned, shared = (self._turn(part, freqs, packed_seq_params) for part in (turned, shared))
        query = torch.cat([query, turned], -1)
        key = torch.cat([key, shared.expand(*key.shape[:-1], -1)], -1)
        return query, key, value, None, None

    def _query(self, hidden: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return self.linear_q_proj(hidden)[0]
        latent, _ = self.linear_q_down_proj(hidden)
        return self.linear_q_up_proj(self.q_a_layernorm(latent))[0]

    def _shared(self, part: Tensor) -> Tensor:
        """Return ``part`` for all positions; the backward pass sums the gradients of all ranks' heads."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(part, group=self.pg_collection.tp)
        return copy_to_tensor_model_parallel_region(part.contiguous(), group=self.pg_collection.tp)

    def _turn(self, part: Tensor, freqs: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Rotate ``[..., heads, D]`` by position.

        mcore rotates neighbouring columns as pairs, so columns i and i + D / 2 first become neighbours if the
        model rotates them as pairs.
        """
        rotary: Any = self.config.rotary
        if not rotary.interleaved:
            part = part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return apply_rotary_pos_emb(
            part,
            freqs,
            config=self.config,
            cu_seqlens=None if packed is None else packed.cu_seqlens_q,
            mscale=rotary.scaling,
            cp_group=self.pg_collection.cp,
        )
