"""Conversion of a transformers configuration and a layout to Megatron's ``TransformerConfig``."""

import difflib
import json
import typing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import PreTrainedConfig

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from components.engines.megatron import float8
from components.engines.megatron.checks import has_latents, uses_transformer_engine
from components.engines.megatron.layout import Layout
from components.engines.megatron.moe_config import read_moe_config
from components.engines.megatron.pipeline_split import add_mtp_layers
from components.engines.shared.recomputation import recomputed_modules
from components.json_text import one_line
from components.models.mtp import num_mtp_layers

FURTHER = "parallelism.transformer_config"
RENAMED = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "cp_comm_type": "cp_comm_type",
    "first_stage_layers": "num_layers_in_first_pipeline_stage",
    "last_stage_layers": "num_layers_in_last_pipeline_stage",
}
"""Key of the layout -> the field of Megatron's configuration that gets its value."""
RENAMED_OF_EXPERTS = {
    "shared_expert_overlap": "moe_shared_expert_overlap",
    "moe_permute_fusion": "moe_permute_fusion",
    "moe_token_dispatcher": "moe_token_dispatcher_type",
    "capacity_factor": "moe_expert_capacity_factor",
    "moe_token_drop_policy": "moe_token_drop_policy",
    "moe_pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
OURS = {theirs: f"parallelism.{ours}" for ours, theirs in (RENAMED | RENAMED_OF_EXPERTS).items()} | {
    "virtual_pipeline_model_parallel_size": "parallelism.vpp",
    "pipeline_model_parallel_layout": "parallelism.pipeline_layout",
    "recompute_num_layers": "parallelism.recompute_num_layers",
    "recompute_modules": "parallelism.recompute_modules",
    "moe_grouped_gemm": "parallelism.moe_grouped_gemm",
    "bias_activation_fusion": "parallelism.bias_activation_fusion",
    "gradient_accumulation_fusion": "parallelism.gradient_accumulation_fusion",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16", "fp8"), "run.dtype"),
    "fp8_recipe": "parallelism.fp8_recipe",
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"), "model.moe"),
    "cpu_offloading": "parallelism.activation_offloading",
    "fine_grained_activation_offloading": "parallelism.activation_offloading",
    "moe_layer_recompute": "parallelism.recompute_modules",
    "mtp_loss_scaling_factor": "model.mtp.loss_coef",
}
"""Field of Megatron's configuration -> the key of this program's configuration that determines it."""
REFUSED = {
    **dict.fromkeys(
        ("apply_query_key_layer_scaling", "softmax_type", "window_"),
        "this engine's attention is that of the model",
    ),
    "attention_softmax_in_fp32": "only Megatron's own attention reads it, which this engine replaces",
    **dict.fromkeys(
        ("cuda_graph", "enable_cuda_graph", "external_cuda_graph"),
        "this engine captures no CUDA graphs, because rows differ in length",
    ),
    **dict.fromkeys(
        ("cpu_offloading_", "offload_modules"),
        "Megatron's own offloading is not used; see parallelism.activation_offloading",
    ),
    "cross_entropy_": "this engine computes the probabilities of labels itself",
    "fp4": "run.dtype has no fp4",
    "fp8_param": "weights are kept in bf16, from which those in float8 are made",
    "layernorm_zero_centered_gamma": "the model's norms are not centred",
    **dict.fromkeys(
        ("fp8_amax_", "fp8_interval", "fp8_margin", "fp8_multi_head_attention", "fp8_wgrad"),
        "only delayed scaling reads it, which is not a value of parallelism.fp8_recipe",
    ),
    **dict.fromkeys(
        ("moe_router_", "moe_input_jitter_eps", "moe_enable_routing_replay"),
        "it belongs to Megatron's own router, which this engine replaces; see model.moe",
    ),
    **dict.fromkeys(
        ("rotary_base", "rotary_percent", "original_max_position_", "beta_fast", "beta_slow", "mscale"),
        "the rotary embedding is that of the model",
    ),
    "overlap_moe_expert_parallel_comm": "the forward step of this engine makes no schedule plan for it",
    "perform_initialization": "it must stay true: otherwise the gradient norm lacks most split weights",
    "tp_comm_": "this engine does not create the buffers that transformer-engine needs for it",
    "use_te_rng_tracker": "only Megatron's training script reads it",
    "variable_seq_lengths": "pipeline stages know the lengths of all rows from the plan",
}
"""Beginning of the names of fields without an effect on this engine, or with which it fails -> the reason."""
READ_IN_FLOAT8 = ("fp8_", "first_last_layers_bf16", "num_layers_at_", "tp_only_amax_red")
"""Beginning of the names of fields that are read only with ``run.dtype=fp8``."""


def transformer_config(hf: PreTrainedConfig, layout: Layout, options: EngineOptions) -> TransformerConfig:
    """Return the configuration of the same model as in transformers, split according to ``layout``.

    Losses are summed, never averaged (``calculate_per_token_loss``), and parameters start uninitialised.

    Raises:
        ConfigError: if a field of ``layout.transformer_config`` is set by this program, is unknown
            or has another type, or Megatron refuses it.
    """
    dtype, adapter = options.dtype, options.adapter
    uses_te = uses_transformer_engine(hf, layout, dtype, options.device, adapter)
    kind = MLATransformerConfig if has_latents(hf) else TransformerConfig
    ours = dict(
        **architecture(hf),
        **mla_arguments(hf),
        **moe_arguments(hf, layout),
        **parallelism(layout, num_mtp_layers(hf)),
        **recomputation(layout),
        **(float8.config_fields(layout) if options.float8 else {}),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        calculate_per_token_loss=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        init_method=leave_empty,
        output_layer_init_method=leave_empty,
        bias_activation_fusion=layout.fuses_activation(options.device),
        gradient_accumulation_fusion=fuses_gradients(layout, options, uses_te=uses_te),
        # These need Apex, or, as for dropout and biases after a projection, have nothing to fuse.
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        # The kernel of transformer-engine reads sequence boundaries on the device. Without it, Megatron reads
        # them on the host, four times in each layer.
        apply_rope_fusion=uses_te,
    )
    given = layout.transformer_config or {}
    check_further_fields(kind, given, ours)
    try:
        config = kind(**ours, **given)
    except Exception as error:
        if not given:
            raise
        raise ConfigError(
            f"{FURTHER}: Megatron refuses {list(given)} here ({type(error).__name__}: {one_line(error)}); "
            "change or remove a field."
        ) from error
    config.transformer_engine = uses_te
    config.windows, config.rotary = windows(hf), rotary(hf)
    config.experts = read_moe_config(hf)
    return config


def check_further_fields(kind: type[TransformerConfig], given: Config, ours: Config) -> None:
    """Raise ConfigError if a field in ``parallelism.transformer_config`` or its value is not allowed."""
    hints = typing.get_type_hints(kind)
    for name, value in given.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1, cutoff=0)
            raise ConfigError(
                f"{FURTHER}.{name}: is not a field of Megatron's {kind.__name__}; did you mean {near[0]!r}?"
            )
        if (why := why_refused(name, ours)) is not None:
            raise ConfigError(f"{FURTHER}.{name}: may not be set here; {why}.")
        try:
            adapter = TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{FURTHER}.{name}: got {value!r}; {error.errors()[0]['msg']}.") from error


def why_refused(name: str, ours: Config) -> str | None:
    """Return why the field ``name`` may not be set, or None if it may."""
    of_recomputation = "parallelism.activation_checkpointing" if name.startswith("recompute_") else None
    if key := OURS.get(name, of_recomputation):
        return f"use {key}"
    if name in ours:
        return "the model or this engine gives its value"
    reason = next((why for beginning, why in REFUSED.items() if name.startswith(beginning)), None)
    if reason is None and name.startswith(READ_IN_FLOAT8) and "fp8" not in ours:
        reason = "it has an effect only with run.dtype=fp8"
    return reason and f"{reason}; leave it out"


def leave_empty(_: torch.Tensor) -> None:
    """Leave a parameter uninitialised.

    Its values are later read from a model folder or drawn from a generator seeded with (seed, name).
    """


def architecture(hf: PreTrainedConfig) -> Json:
    """Return Megatron's options for the sizes, norms, activation and attention of the model."""
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
    """Return the fields of ``TransformerConfig`` for the sizes of experts and for the token exchange.

    There are none for a model without experts. ``moe_router.Router`` chooses the experts and computes the
    load balancing loss, not Megatron's router.
    """
    found = read_moe_config(hf)
    if found is None:
        return {}
    return {
        "num_moe_experts": found.number,
        "moe_layer_freq": [int(routed) for routed in found.layers],
        "moe_ffn_hidden_size": found.intermediate,
        "moe_shared_expert_intermediate_size": found.shared or None,
        "moe_router_topk": found.top_k,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": True,  # unused, but Megatron refuses top-1 routing without it
        **{theirs: getattr(layout, ours) for ours, theirs in RENAMED_OF_EXPERTS.items()},
        # Megatron rounds the capacity up, after products whose error could make it exceed all tokens.
        "moe_expert_capacity_factor": layout.capacity_factor and layout.capacity_factor * (1 - 2**-48),
    }


def parallelism(layout: Layout, mtp: int = 0) -> Json:
    """Return the parallelism options; ``mtp`` MTP layers are on the last pipeline stage."""
    interleaved = layout.vpp > 1
    return {
        **{theirs: getattr(layout, ours) for ours, theirs in RENAMED.items()},
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "pipeline_model_parallel_layout": add_mtp_layers(layout.pipeline_layout, mtp),
        "deallocate_pipeline_outputs": True,
        # Batched transfers are unordered between the two directions. With two stages, each is both the
        # previous and the next one of the other, so chunks could silently receive each other's tensors.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Megatron would wait for the whole GPU after each transfer, because of a bug that torch has fixed:
        # https://github.com/pytorch/pytorch/pull/82450
        "batch_p2p_sync": False,
    }


def fuses_gradients(layout: Layout, options: EngineOptions, *, uses_te: bool) -> bool:
    """Return ``gradient_accumulation_fusion``, or its default."""
    if layout.gradient_accumulation_fusion is not None:
        return layout.gradient_accumulation_fusion
    return options.device == "cuda" and not (uses_te or layout.activation_offloading)


def recomputation(layout: Layout) -> Json:
    if layout.activation_checkpointing == "full":
        first = layout.recompute_num_layers
        method = {"recompute_method": "uniform" if first is None else "block"}  # uniform: in groups of 1
        return {"recompute_granularity": "full", "recompute_num_layers": first or 1} | method
    modules = recomputed_modules(layout.activation_checkpointing, layout.recompute_modules)
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]} if modules else {}


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


WINDOW_IN_EVERY_LAYER = ("mistral", "mixtral", "qwen3_moe")
"""Model families in which every layer has the config's ``sliding_window``, whatever ``layer_types`` says."""
WINDOW_BY_LAYER_TYPE = ("qwen2", "qwen3")
"""Model families in which the layers with the type ``sliding_attention`` have the ``sliding_window``."""


def windows(hf: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's attention window in tokens, including the current one; None means no limit.

    The MTP layers follow, with the window of the last layer. Fields of a config.json that the family's model
    in transformers does not read have no effect here either.
    """
    number = hf.num_hidden_layers + num_mtp_layers(hf)
    if hf.model_type in WINDOW_IN_EVERY_LAYER:
        return (hf.sliding_window,) * number
    if hf.model_type not in WINDOW_BY_LAYER_TYPE:
        return (None,) * number
    kinds = [*hf.layer_types, *hf.layer_types[-1:] * num_mtp_layers(hf)]
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class Rotary:
    """Parameters of the rotary embedding, taken from transformers.

    Megatron's own llama3 scaling has hard-coded constants.
    """

    frequencies: torch.Tensor
    """Inverse frequencies, float32 ``[D / 2]``, for D rotated dimensions of a head."""
    scaling: float
    """Factor by which the rotated dimensions are multiplied (the attention scaling of yarn)."""
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
    if rope["rope_type"] == "default":
        rope = {}  # transformers reads no scaling from the other keys then
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
