"""Megatron's GPT model, with per-token statistics of the labels as its output."""

from collections.abc import Iterator
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
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PreTrainedConfig

from components.contracts.loss import TokenStats
from components.engines.megatron.runtime.attention import CoreAttention, packed_seq_params
from components.engines.megatron.runtime.cp_sharding import CPShard
from components.engines.megatron.runtime.dropout_hashes import InputHashes, MicrobatchHashes
from components.engines.megatron.runtime.grouped_experts import GroupedExperts
from components.engines.megatron.runtime.mla import LatentAttention
from components.engines.megatron.runtime.moe_router import Router, TokenRouting, find_routers
from components.engines.megatron.runtime.mtp import mtp_spec
from components.engines.shared.mtp import TokenStatsWithMTP
from components.engines.shared.neftune import NoisyEmbedding
from components.engines.shared.token_log_probs import scalar_stats, token_stats
from components.engines.shared.vocab_parallel import VocabularyShard


@dataclass(frozen=True)
class ForwardRequest:
    """The input of one forward pass: this rank's share of the rows, and what to compute from it."""

    shard: CPShard
    requires: frozenset[str] = frozenset()
    weights: Tensor | None = None
    """The weights of the labels in the loss, times ``Pass.factor``: float32 in the shape of ``shard.labels``.
    None means that the loss has no such weights."""
    noise: tuple[Tensor, Tensor] | None = None
    """Keys and bounds of the noise on embeddings (see ``NEFTune.noise_of``): ``[B, L]``, or ``[L / tp, B]``
    with sequence parallelism. None means no noise."""
    hashes: MicrobatchHashes | None = None
    """The hashes of the tokens, for the dropout of adapters. None means no dropout."""
    routing: TokenRouting | None = None
    """Input for the routers. None means that this rank has no routers."""
    mtp: tuple["ForwardRequest", ...] = ()
    """The inputs of the MTP layers, by depth. If empty, these layers are not computed."""


class LogProbGPTModel(GPTModel):
    """One chunk of the model; it returns hidden states ``[s, b, h]``, or statistics if it is the last chunk.

    With tensor parallelism the statistics are the same on every tensor-parallel rank. With context
    parallelism they are those of this rank's positions.
    """

    output_layer: Any

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        *,
        scalar_head: bool,
        vp_stage: int | None,
        **options: object,
    ) -> None:
        spec = block_spec(config, vp_stage)
        if config.mtp_num_layers:
            options["mtp_block_spec"] = mtp_spec(config, spec, vp_stage)
        padded = padded_vocab_size(vocab_size, config)
        super().__init__(config, spec, vocab_size=padded, vp_stage=vp_stage, **options)
        # Our attention reads sequence boundaries on the CPU, transformer-engine's on the device.
        self.boundaries = torch.device(torch.cuda.current_device()) if config.transformer_engine else None
        self.routers = find_routers([self])
        for parameter in expert_parameters(self):
            # Megatron reduces these gradients over the ranks that hold the same experts, but with ep=1 it
            # does not set this flag. It is needed if tp > etp, because tp ranks then have different tokens.
            parameter.allreduce = False  # type: ignore[attr-defined]
        self.noise, self.hashes = NoisyEmbedding(), InputHashes()
        if self.pre_process:
            self.embedding.word_embeddings.register_forward_hook(self.noise)
        self.tp = self.pg_collection.tp
        rows = padded // self.tp.size()
        start = self.tp.rank() * rows
        self.shard = VocabularyShard(self.tp, start, vocab_size)
        self.head_rows = max(min(vocab_size - start, rows), 0)
        if self.post_process:
            if scalar_head:  # replicated over tp
                weight = self.output_layer.weight
                self.output_layer = nn.Linear(
                    config.hidden_size, 1, bias=False, dtype=weight.dtype, device=weight.device
                )
            # The layer itself is called, because Megatron gathers its parameters before the call.
            self.output_layer.forward = self.scores if scalar_head else self.statistics

    def forward(self, asked: ForwardRequest) -> object:
        row = asked.shard
        for router in self.routers:
            router.token_routing = asked.routing
        self.noise.given = asked.noise
        self.hashes.use(asked.hashes)
        packed = packed_seq_params(row, self.boundaries)
        return super().forward(row.input_ids, row.position_ids, None, labels=asked, packed_seq_params=packed)

    def _postprocess(
        self, hidden_states: Tensor, *, labels: ForwardRequest, **others: object
    ) -> Tensor | TokenStatsWithMTP:
        """Return statistics in place of logits; Megatron passes ``labels`` through unchanged."""
        if labels.hashes is not None and hidden_states.requires_grad:
            # Other micro-batches run before the backward pass of this one, which may recompute layers.
            hidden_states.register_hook(lambda _: self.hashes.use(labels.hashes))
        if not self.post_process:
            return hidden_states
        stats = self.output_layer(hidden_states, labels)
        mtp = self._mtp(hidden_states, labels.mtp, **others)
        return TokenStatsWithMTP(**vars(stats), mtp=tuple(mtp))

    def _mtp(
        self,
        hidden: Tensor,
        depths: tuple[ForwardRequest, ...],
        rotary_pos_emb: object,
        packed_seq_params: object,
        **_: object,
    ) -> Iterator[Tensor]:
        """Yield ``logps`` of each MTP depth; ``hidden`` is the output of the final norm."""
        for layer, asked in zip(self.mtp.layers if depths else (), depths, strict=True):
            hidden, _, _ = layer(
                input_ids=asked.shard.input_ids,
                position_ids=asked.shard.position_ids,
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
            )
            yield self.output_layer(hidden, asked).logps

    def statistics(self, hidden_states: Tensor, asked: ForwardRequest) -> TokenStats:
        """Compute the statistics of the labels from the output ``[s, b, h]`` of the final norm."""
        # Each tp rank computes a part of the hidden states' gradient; the backward pass here sums the parts.
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=self.tp).transpose(0, 1)
        else:  # transposed first, because Megatron loses the sum of a gradient that is not contiguous
            hidden = copy_to_tensor_model_parallel_region(hidden_states.transpose(0, 1), group=self.tp)
        head = self.head
        return token_stats(
            hidden,
            # Without padding there is no slice, whose backward pass would fill a second tensor.
            head if self.head_rows == len(head) else head[: self.head_rows],
            asked.shard.labels,
            requires=asked.requires,
            weights=asked.weights,
            label_index=asked.shard.label_index,
            shard=self.shard if self.tp.size() > 1 else None,
        )

    def scores(self, hidden_states: Tensor, asked: ForwardRequest) -> TokenStats:
        """Compute the output of the scalar head, from the same input as ``statistics``."""
        assert asked.requires <= {"values"}, "a model with a scalar head has no log-probabilities"
        # Every tp rank computes all scores, so that the gradient of its hidden states is complete.
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tp
            )
        return scalar_stats(hidden_states.transpose(0, 1), self.output_layer.weight)

    @property
    def head(self) -> Tensor:
        """Weight of the output head, ``[padded vocabulary / tp, H]``."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def padded_vocab_size(vocab_size: int, config: TransformerConfig) -> int:
    """Return the size of the vocabulary rounded up to a multiple of tp; padding is not in the softmax."""
    tp = config.tensor_model_parallel_size
    return -(-vocab_size // tp) * tp


def build_chunks(
    hf: PreTrainedConfig, config: TransformerConfig, *, scalar_head: bool = False
) -> list[LogProbGPTModel]:
    """Build this rank's chunks (one, or vpp if interleaved); their parameters are uninitialised."""
    number = config.virtual_pipeline_model_parallel_size
    chunks: list[LogProbGPTModel] = []
    for vp_stage in [None] if number is None else range(number):
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        chunk = LogProbGPTModel(
            config,
            hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not scalar_head,
            position_embedding_type="rope",
            scalar_head=scalar_head,
            vp_stage=vp_stage,
        )
        if not config.multi_latent_attention:
            chunk.rotary_pos_emb.inv_freq = config.rotary.frequencies.to(torch.cuda.current_device())
        chunks.append(chunk.to(torch.cuda.current_device()))  # torch creates its norms on the CPU
    return chunks


def block_spec(config: TransformerConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """Return the spec of transformer-engine's layers, or of Megatron's own layers.

    The latter have the attention, routers and grouped experts of this engine.
    """
    if config.transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    routed = config.experts.layers if config.experts else (False,) * config.num_layers
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    # The final norm is explicit, because Megatron's default depends on the installed packages.
    layers = [layer_spec(config, routed=routed[number]) for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


def layer_spec(config: TransformerConfig, *, routed: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if routed else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    if config.multi_latent_attention:
        layer.submodules.self_attention.module = LatentAttention
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    if routed:
        layer.submodules.mlp.submodules.router = Router
        if config.groups_experts:
            layer.submodules.mlp.submodules.experts = GroupedExperts
    return layer


def expert_parameters(chunk: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the routed experts, without shared experts."""
    layers = [module.experts for module in chunk.modules() if isinstance(module, MoELayer)]
    return [parameter for experts in layers for parameter in experts.parameters()]
