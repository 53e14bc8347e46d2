"""Models that our engines would train wrongly are refused by name, instead of trained wrongly."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from runner.errors import ConfigError

CHANGES_LOGITS = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "output_multiplier",
)
"""Fields that change attention scores or logits in a way our engines do not compute, unless None or 1."""

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def check_heads(config: PreTrainedConfig) -> None:
    """Every key-value head serves the same number of heads."""
    heads = getattr(config, "num_attention_heads", 1)
    shared = getattr(config, "num_key_value_heads", None) or heads
    if heads < 1 or getattr(config, "num_key_value_heads", 1) == 0 or heads % shared:
        raise ConfigError(
            f"model.architecture.num_attention_heads: {heads} does not divide by num_key_value_heads = "
            f"{config.num_key_value_heads}; choose a multiple of it."
        )


def check_config(config: PreTrainedConfig) -> None:
    """
    Raises:
        ConfigError: not a causal language model, quantised weights, experts, or logits scaled or capped.
    """
    kind = config.model_type
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.is_encoder_decoder or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote):
        raise not_causal(kind)
    text = config.get_text_config()
    check_heads(text)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            "model: quantization_config is set: quantised weights cannot be trained; use the original."
        )
    for key in CHANGES_LOGITS:
        if getattr(text, key, None) not in (None, 1):
            raise ConfigError(
                f"model: {key}={getattr(text, key)} of {kind} is not computed by our engines; choose a model "
                "without it."
            )
    for key in EXPERTS:
        if getattr(text, key, None):
            raise ConfigError(
                f"model: {key}={getattr(text, key)} of {kind}: experts are not trained by our engines; "
                "choose a dense model."
            )


def check_model(model: PreTrainedModel) -> None:
    """Tokens may meet in causal attention only, and only where an engine can replace it: packed sequences
    would see each other anywhere else. And all state must be parameters, built without data.

    Raises:
        ConfigError: one of these does not hold.
    """
    kind = model.config.model_type
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise not_causal(kind)
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not model._supports_attention_backend or model._is_stateful or layers - ATTENTION_LAYERS:
        raise ConfigError(
            f"model: {kind} mixes tokens outside of transformers' attention interface, which our engines use "
            "to keep packed sequences apart."
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(model.state_dict().keys() - parameters.keys()):
        raise ConfigError(f"model: {kind} keeps {name} outside its parameters; nothing would train it.")
    for name, parameter in parameters.items():
        if not parameter.is_meta:
            raise ConfigError(f"model: {kind} cannot be built without its data: {name} insists on memory.")


def not_causal(kind: str) -> ConfigError:
    return ConfigError(
        f"model: {kind} is not a causal language model; choose a decoder such as qwen3 or llama."
    )
