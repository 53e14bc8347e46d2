"""Conversion of a transformers configuration and a layout to Megatron's ``TransformerConfig``."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from transformers import PreTrainedConfig

from components.contracts.engine import EngineOptions
from components.contracts.json_types import Json
from components.engines.megatron.checks import has_latents, uses_transformer_engine
from components.engines.megatron.layout import Layout
from components.engines.megatron.moe_config import read_moe_config
from components.engines.megatron.pipeline_split import add_mtp_layers
from components.models.mtp import num_mtp_layers


def transformer_config(hf: PreTrainedConfig, layout: Layout, options: EngineOptions) -> TransformerConfig:
    """Return the configuration of the same model as in transformers, split according to ``layout``.

    Losses are summed, never averaged (``calculate_per_token_loss``), and parameters start uninitialised.
    """
    dtype, adapter = options.dtype, options.adapter
    uses_te = uses_transformer_engine(hf, layout, dtype, options.device, adapter)
    kind = MLATransformerConfig if has_latents(hf) else TransformerConfig
    config = kind(
        **architecture(hf),
        **mla_arguments(hf),
        **moe_arguments(hf, layout),
        **parallelism(layout, num_mtp_layers(hf)),
        **recomputation(layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # Not perform_initialization=False, with which parameters would not be marked as split over tp and
        # most of them would be missing from the gradient norm.
        init_method=leave_empty,
        output_layer_init_method=leave_empty,
        # Fused kernels of Apex and torch.compile do not exist on a CPU, and sequence lengths vary.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        # The kernel of transformer-engine reads sequence boundaries on the device. Without it, Megatron reads
        # them on the host, four times in each layer.
        apply_rope_fusion=uses_te,
    )
    config.transformer_engine = uses_te
    config.windows, config.rotary = windows(hf), rotary(hf)
    config.experts = read_moe_config(hf)
    return config


def leave_empty(_: torch.Tensor) -> None:
    """Initialise nothing: values come from a model folder or are drawn from (seed, name) later."""


def architecture(hf: PreTrainedConfig) -> Json:
    """Return the model's sizes and functions under Megatron's names."""
    return {
        "num_layers": hf.num_hidden_layers,
        "mtp_num_layers": num_mtp_layers(hf) or None,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": getattr(hf, "attention_dropout", 0.0),
    }


def moe_arguments(hf: PreTrainedConfig, layout: Layout) -> Json:
    """Return the options for the sizes of experts and the token exchange; our ``Router`` chooses experts."""
    found = read_moe_config(hf)
    if found is None:
        return {}
    return {
        "num_moe_experts": found.number,
        "moe_layer_freq": [int(routed) for routed in found.layers],
        "moe_ffn_hidden_size": found.intermediate,
        "moe_shared_expert_intermediate_size": found.shared or None,
        "moe_shared_expert_overlap": layout.shared_expert_overlap,
        "moe_router_topk": found.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # unused, but Megatron refuses top-1 routing without it
        "moe_token_dispatcher_type": layout.moe_token_dispatcher,
        "moe_expert_capacity_factor": layout.capacity_factor,
        "moe_token_drop_policy": layout.moe_token_drop_policy,
        "moe_pad_expert_input_to_capacity": layout.moe_pad_to_capacity,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def parallelism(layout: Layout, mtp: int = 0) -> Json:
    """Return the parallelism options; ``mtp`` MTP layers are on the last pipeline stage."""
    interleaved = layout.vpp > 1
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "cp_comm_type": layout.cp_comm_type,
        "pipeline_model_parallel_layout": add_mtp_layers(layout.pipeline_layout, mtp),
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "deallocate_pipeline_outputs": True,
        # Batched transfers are unordered between the two directions. With two stages, each is both the
        # previous and the next one of the other, so chunks could silently receive each other's tensors.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Megatron would wait for the whole GPU after each transfer, because of a bug that torch has fixed:
        # https://github.com/pytorch/pytorch/pull/82450
        "batch_p2p_sync": False,
    }


def recomputation(layout: Layout) -> Json:
    if layout.activation_checkpointing == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if layout.activation_checkpointing == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def windows(hf: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens, including the current one; None means no limit.

    The MTP layers follow, with the window of the last layer.
    """
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if types is None:  # without types all layers have the same window, or none
        return (window,) * (hf.num_hidden_layers + num_mtp_layers(hf))
    kinds = [*types, *types[-1:] * num_mtp_layers(hf)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding as in transformers, because Megatron's llama3 scaling has fixed parameters."""

    frequencies: torch.Tensor
    """Inverse frequencies, float32 ``[D / 2]``."""
    scaling: float
    """Factor applied to the rotated dimensions (the attention scaling of yarn)."""
    interleaved: bool
    """Whether neighbouring columns are rotated as pairs, instead of columns i and i + D / 2."""


def rotary(hf: PreTrainedConfig) -> Rotary:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, interleaved = hf.rope_parameters, has_latents(hf) and bool(hf.rope_interleave)
    if rope["rope_type"] == "default":
        steps = torch.arange(0, head_dim(hf), 2, dtype=torch.int64).float() / head_dim(hf)
        return Rotary(1.0 / (rope["rope_theta"] ** steps), 1.0, interleaved)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
    assert scaling == 1.0 or has_latents(hf), f"attention scaling {scaling} of rope {rope['rope_type']}"
    return Rotary(frequencies, scaling, interleaved)


def mla_arguments(hf: PreTrainedConfig) -> Json:
    """Return the additional options of ``LatentAttention``, including the score scaling of yarn."""
    if not has_latents(hf):
        return {}
    rope = hf.rope_parameters
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",  # the frequencies and their scaling are those of ``rotary``
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
