"""Checks that reject models which the engines would train incorrectly."""

from collections.abc import Set

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from components.contracts.errors import ConfigError
from components.models.experts import moe_blocks, router_biases
from components.models.hf_private import uses_attention_interface
from components.models.moe_loss_config import MoELossConfig

CHANGES_LOGITS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "output_multiplier",
)
"""Fields that change attention scores or logits in a way that engines do not support, unless None or 1."""

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
ROUTED = ("deepseek_v3", "mixtral", "qwen3_moe")
"""MoE families that the engines train, because their results were compared with those of transformers."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_heads(config: PreTrainedConfig) -> None:
    """Raise ConfigError if the number of heads is not a multiple of the number of key-value heads."""
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads < 1 or getattr(config, "num_key_value_heads", 1) == 0 or heads % shared:
        raise ConfigError(
            f"model.architecture.num_attention_heads: {heads} is not divisible by num_key_value_heads = "
            f"{config.num_key_value_heads}; choose a multiple of it."
        )


def check_latents(config: PreTrainedConfig) -> None:
    """Raise ConfigError if the numbers of heads and of key-value heads differ in latent attention (MLA)."""
    if getattr(config, "kv_lora_rank", None) is None:
        return
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if shared != heads:
        raise ConfigError(
            f"model.architecture.num_key_value_heads: {shared} of {config.model_type}, every head of which "
            f"has keys and values of its own; set it to num_attention_heads = {heads}."
        )


def check_causal(config: PreTrainedConfig) -> None:
    """Raise ConfigError if ``config`` is not that of a causal language model."""
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote):
        raise not_causal(config.model_type)


def check_config(config: PreTrainedConfig) -> None:
    """Raise ConfigError if the engines cannot compute a causal language model of this configuration.

    It must have no quantised weights, no router jitter, and no scaled or capped logits. Experts must be those
    of a family in ``ROUTED``.
    """
    kind = config.model_type
    text = config.get_text_config()
    check_heads(text)
    check_latents(text)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            "model: quantization_config is set: quantised weights cannot be trained; use the original."
        )
    for key in CHANGES_LOGITS:
        if getattr(text, key, None) not in (None, 1):
            raise ConfigError(
                f"model: {key}={getattr(text, key)} of {kind} is not supported by the engines; choose a "
                "model without it."
            )
    for key in EXPERTS:
        if getattr(text, key, None) and kind not in ROUTED:
            raise not_routed(f"{key}={getattr(text, key)} of {kind}")
    if kind in ROUTED:
        check_chosen(text)
    if getattr(text, "router_jitter_noise", 0):
        raise ConfigError(
            f"model: router_jitter_noise={text.router_jitter_noise} of {kind} is not supported by "
            "the engines; set it to 0."
        )


def check_model(model: PreTrainedModel) -> None:
    """Raise ConfigError if the engines cannot train ``model``.

    Only causal attention that an engine can replace may mix tokens; otherwise packed sequences would attend
    to each other. All state must be parameters that can be built on the meta device.
    """
    kind = model.config.model_type
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise not_causal(kind)
    if kind not in ROUTED and (blocks := moe_blocks(model)):
        raise not_routed(f"{next(iter(blocks))}.experts of {kind}")
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not uses_attention_interface(model) or layers - ATTENTION_LAYERS:
        raise ConfigError(
            f"model: {kind} mixes tokens outside of transformers' attention interface, which our engines use "
            "to keep packed sequences apart."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(model.state_dict().keys() - parameters.keys()):
        raise ConfigError(f"model: {kind} keeps {name} outside its parameters; it would not be trained.")
    for name, parameter in parameters.items():
        if not parameter.is_meta:
            raise ConfigError(
                f"model: {kind} cannot be built without its data: {name} does not support the meta device."
            )
    head = model.get_output_embeddings()
    check_head(model, head)
    parts = (model.base_model, head or model)
    known = {id(parameter) for part in parts for parameter in part.parameters()}
    if left := [name for name, parameter in parameters.items() if id(parameter) not in known]:
        raise ConfigError(
            f"model: {kind} computes its logits with {left[0]}, between its last block and its vocabulary "
            "head; the engines apply that head only. Choose another model."
        )


def check_head(model: PreTrainedModel, head: nn.Module | None) -> None:
    """Raise ConfigError if ``head`` is not one linear layer that is applied to the states of the base model.

    None, as of a classifier, is accepted.
    """
    kind = model.config.model_type
    plain = head is None or (type(head).forward is nn.Linear.forward and len([*head.parameters()]) <= 2)
    if not plain:
        raise ConfigError(
            f"model: {kind} computes its logits with a {type(head).__name__}, but the engines support "
            "only one linear layer; choose another model."
        )
    if any(module is head for module in model.base_model.modules()):
        raise ConfigError(
            f"model: {kind} has its vocabulary head inside its {type(model.base_model).__name__}, which "
            "returns logits, but the engines need the states before the head; choose another model."
        )


def check_chosen(config: PreTrainedConfig) -> None:
    """Raise ConfigError if expert groups are invalid or a token cannot choose enough experts from them."""
    number, top_k = config.num_local_experts, config.num_experts_per_tok or 0
    left = number
    if config.model_type == "deepseek_v3":
        groups, kept = config.n_group or 0, config.topk_group or 0
        if groups < 1 or number % groups or number // groups < 2:
            raise ConfigError(
                f"model.architecture.n_group: {groups} does not cut {number} experts into groups of two at "
                f"least; use a divisor of {number}, at most {number // 2}."
            )
        if not 1 <= kept <= groups:
            raise ConfigError(
                f"model.architecture.topk_group: {kept} is not among 1 to n_group = {groups}; use one of "
                "them."
            )
        left = number // groups * kept
    if not 1 <= top_k <= left:
        raise ConfigError(
            f"model.architecture.num_experts_per_tok: is {top_k}, but a token chooses among {left} experts; "
            f"use 1 to {left}."
        )


def check_moe_losses(model: PreTrainedModel, terms: MoELossConfig, frozen: Set[str] = frozenset()) -> None:
    """Raise ConfigError if the router losses or the bias updates would have no effect on ``model``.

    A loss needs routers and a coefficient. ``bias_update_rate`` needs router biases that are not ``frozen``.
    """
    kind = model.config.model_type
    asked = {
        "aux_loss": terms.aux_loss != "none",
        "z_loss_coef": terms.z_loss_coef,
        "bias_update_rate": terms.bias_update_rate,
    }
    if (key := next((key for key, value in asked.items() if value), None)) and not moe_blocks(model):
        raise ConfigError(f"model.moe.{key}: {kind} has no experts; leave it out, or use model=moe_tiny.")
    if terms.aux_loss != "none" and not terms.aux_loss_coef:
        raise ConfigError(
            f"model.moe.aux_loss_coef: is 0, so that model.moe.aux_loss={terms.aux_loss} would do nothing; "
            "set it above 0, or model.moe.aux_loss=none."
        )
    if terms.aux_loss_coef and terms.aux_loss == "none":
        raise ConfigError(
            f"model.moe.aux_loss: is none, so that model.moe.aux_loss_coef={terms.aux_loss_coef} would do "
            "nothing; use switch, sequence or global_batch, or model.moe.aux_loss_coef=0."
        )
    if terms.bias_update_rate and not router_biases(model):
        raise ConfigError(
            f"model.moe.bias_update_rate: the routers of {kind} have no bias; use model.moe.aux_loss, or "
            "model.moe.bias_update_rate=0."
        )
    if terms.bias_update_rate and (fixed := sorted(frozen & router_biases(model).keys())):
        raise ConfigError(
            f"model.moe.bias_update_rate: is {terms.bias_update_rate}, and model.freeze or model.train_only "
            f"freezes {fixed[0]}; use model.moe.bias_update_rate=0, or other patterns."
        )


def not_routed(found: str) -> ConfigError:
    return ConfigError(
        f"model: {found}: the only models with experts that the engines train are {', '.join(ROUTED)}; "
        "choose one of them, or a dense model."
    )


def not_causal(kind: str) -> ConfigError:
    return ConfigError(
        f"model: {kind} is not a causal language model; choose a decoder such as qwen3 or llama."
    )
