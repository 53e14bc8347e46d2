"""Megatron's GPT model, answering with per-token statistics of the labels."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor
from transformers import PreTrainedConfig

from components.engines.logps import token_stats
from components.engines.megatron.runtime.attention import CoreAttention, packed_seq_params
from components.engines.megatron.runtime.config import rotary_frequencies
from components.engines.megatron.runtime.rows import Row
from components.engines.vocabulary import VocabularyShard
from runner.protocols import TokenStats


@dataclass(frozen=True)
class Asked:
    """What a loss wants to know of one row."""

    row: Row
    requires: frozenset[str] = frozenset()
    weights: Tensor | None = None
    """float32 like ``row.labels``."""


class Scorer(GPTModel):
    """One chunk of the model: ``[s, b, h]`` hidden states to the next stage, statistics from the last.

    With tensor parallelism the statistics are the same on every rank that shares the vocabulary; with
    context parallelism they are those of this rank's positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        transformer_engine: bool,
        **options: Any,
    ) -> None:
        spec = block_spec(config, options["vp_stage"], transformer_engine=transformer_engine)
        super().__init__(config, spec, vocab_size=padded(vocab_size, config), **options)
        # Our attention reads the boundaries of sequences on the CPU, transformer-engine's on the device.
        self.boundaries = torch.device(torch.cuda.current_device()) if transformer_engine else None
        self.tp = self.pg_collection.tp
        rows = padded(vocab_size, config) // self.tp.size()
        start = self.tp.rank() * rows
        self.shard = VocabularyShard(self.tp, start, vocab_size)
        self.head_rows = max(min(vocab_size - start, rows), 0)
        if self.post_process:
            # By a call of the layer, which Megatron gathers its parameters before.
            self.output_layer.forward = self.statistics

    def forward(self, asked: Asked) -> Any:
        row = asked.row
        packed = packed_seq_params(row, self.boundaries)
        return super().forward(row.input_ids, row.position_ids, None, labels=asked, packed_seq_params=packed)

    def _postprocess(self, hidden_states: Tensor, *, labels: Asked, **_: Any) -> Tensor | TokenStats:
        """In place of logits; Megatron passes ``labels`` through unread."""
        return self.output_layer(hidden_states, labels) if self.post_process else hidden_states

    def statistics(self, hidden_states: Tensor, asked: Asked) -> TokenStats:
        """From ``[s, b, h]``, of the last norm."""
        # Every rank of the vocabulary has its part of the gradient of the hidden states: these add them up.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=self.tp).transpose(0, 1)
        else:  # transposed first: Megatron loses the sum of a gradient that is not contiguous
            hidden = copy_to_tensor_model_parallel_region(hidden_states.transpose(0, 1), group=self.tp)
        head = self.head
        return token_stats(
            hidden,
            # Sliced only where there is padding: the backward of a slice fills a second tensor.
            head if self.head_rows == len(head) else head[: self.head_rows],
            asked.row.labels,
            requires=asked.requires,
            weights=asked.weights,
            shard=self.shard if self.tp.size() > 1 else None,
        )

    @property
    def head(self) -> Tensor:
        """``[padded vocabulary / tp, H]``"""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def padded(vocab_size: int, config: TransformerConfig) -> int:
    """Every rank of the vocabulary holds as many rows; those past the end stay out of the softmax."""
    tp = config.tensor_model_parallel_size
    return -(-vocab_size // tp) * tp


def build_chunks(
    hf: PreTrainedConfig, config: TransformerConfig, *, transformer_engine: bool
) -> list[Scorer]:
    """This rank's chunks, one but for the interleaved pipeline; parameters hold no values yet."""
    chunks = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if chunks is None else list(range(chunks))
    return [build_chunk(hf, config, stage, transformer_engine=transformer_engine) for stage in stages]


def build_chunk(
    hf: PreTrainedConfig, config: TransformerConfig, vp_stage: int | None, *, transformer_engine: bool
) -> Scorer:
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = Scorer(
        config,
        hf.vocab_size,
        transformer_engine=transformer_engine,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    chunk.rotary_pos_emb.inv_freq = rotary_frequencies(hf).to(torch.cuda.current_device())
    return chunk.to(torch.cuda.current_device())  # torch's norms are made on the CPU


def block_spec(
    config: TransformerConfig, vp_stage: int | None, *, transformer_engine: bool
) -> ModuleSpec | TransformerBlockSubmodules:
    """Layers of transformer-engine, or Megatron's own around our attention."""
    options = {"qk_layernorm": config.qk_layernorm}
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**options)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    # Named, as Megatron's choice for the last norm depends on what else is installed.
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
