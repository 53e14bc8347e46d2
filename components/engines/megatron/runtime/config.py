"""From a transformers configuration and a layout to Megatron's ``TransformerConfig``."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from transformers import PreTrainedConfig

from components.engines.megatron.layout import Layout


def transformer_config(hf: PreTrainedConfig, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """The same function of the weights as transformers computes, split as ``layout`` says.

    Losses are summed, never averaged (``calculate_per_token_loss``), and parameters start without values.
    """
    config = TransformerConfig(
        **architecture(hf),
        **parallelism(layout),
        **recomputation(layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        # Not perform_initialization=False: with it parameters would not be marked as split over tp, and
        # the norm of the gradient would leave most of them out.
        init_method=leave_empty,
        output_layer_init_method=leave_empty,
        # Fused kernels of Apex and of torch.compile: none is there on a CPU, and lengths vary.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    config.windows = windows(hf)
    return config


def leave_empty(_: torch.Tensor) -> None:
    """Values come from a model folder, or from (seed, name); drawing them here would be for nothing."""


def architecture(hf: PreTrainedConfig) -> dict[str, Any]:
    """Shapes and functions, under Megatron's names."""
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_dim(hf),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": hf.model_type == "qwen3",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "hidden_dropout": 0.0,
        "attention_dropout": getattr(hf, "attention_dropout", 0.0),
    }


def parallelism(layout: Layout) -> dict[str, Any]:
    interleaved = layout.vpp > 1
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": layout.sequence_parallel,
        "cp_comm_type": layout.cp_comm_type,
        "pipeline_model_parallel_layout": layout.pipeline_layout,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "deallocate_pipeline_outputs": True,
        # Batched transfers have no order between the two directions: with two stages that are both each
        # other's previous and next one, chunks would receive each other's tensors without an error.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def recomputation(layout: Layout) -> dict[str, Any]:
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
    """How many tokens a token of each layer sees, itself included; None: all before it."""
    window = getattr(hf, "sliding_window", None)
    types = getattr(hf, "layer_types", None)
    if types is None:  # without types every layer slides, if any does
        return (window,) * hf.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def rotary_frequencies(hf: PreTrainedConfig) -> torch.Tensor:
    """float32 ``[head_dim / 2]``, as transformers computes them (Megatron's own llama3 scaling is fixed)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf.rope_parameters
    if rope["rope_type"] == "default":
        steps = torch.arange(0, head_dim(hf), 2, dtype=torch.int64).float() / head_dim(hf)
        return 1.0 / (rope["rope_theta"] ** steps)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
    assert scaling == 1.0, f"attention scaling {scaling} of rope {rope['rope_type']}"
    return frequencies
