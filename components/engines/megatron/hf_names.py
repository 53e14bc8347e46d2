"""Which Hugging Face tensors lie in which tensor of Megatron's own checkpoint format.

The left column holds keys of ``GPTModel.sharded_state_dict``, where layer numbers count over all pipeline
stages and gate and up are apart (``_w``, ``_v``). They are the same for Megatron's local layers and for
transformer-engine's, but for norms, which the latter keep inside the linear layer that follows.
"""

import re
from collections.abc import Iterable

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
ATTENTION, HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."
MLP, HF_MLP = LAYER + "mlp.", HF_LAYER + "mlp."


def gated(part: str, hf_part: str) -> dict[str, tuple[str, ...]]:
    """The three matrices of a layer's MLP, or of an expert in it."""
    return {
        f"{MLP}{part}linear_fc1.weight_w": (f"{HF_MLP}{hf_part}gate_proj.weight",),
        f"{MLP}{part}linear_fc1.weight_v": (f"{HF_MLP}{hf_part}up_proj.weight",),
        f"{MLP}{part}linear_fc2.weight": (f"{HF_MLP}{hf_part}down_proj.weight",),
    }


def qkv(leaf: str) -> tuple[str, ...]:
    """Megatron's fused projection: rows of q, k and v take turns, one query group after the other."""
    return tuple(f"{HF_ATTENTION}{letter}_proj.{leaf}" for letter in "qkv")


TABLE: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
    # attention
    LAYER + "input_layernorm.weight": (HF_LAYER + "input_layernorm.weight",),
    ATTENTION + "linear_qkv.layer_norm_weight": (HF_LAYER + "input_layernorm.weight",),
    ATTENTION + "linear_qkv.weight": qkv("weight"),
    ATTENTION + "linear_qkv.bias": qkv("bias"),
    ATTENTION + "q_layernorm.weight": (HF_ATTENTION + "q_norm.weight",),
    ATTENTION + "k_layernorm.weight": (HF_ATTENTION + "k_norm.weight",),
    ATTENTION + "linear_proj.weight": (HF_ATTENTION + "o_proj.weight",),
    # latent attention
    ATTENTION + "linear_q_proj.weight": (HF_ATTENTION + "q_proj.weight",),
    ATTENTION + "linear_q_down_proj.weight": (HF_ATTENTION + "q_a_proj.weight",),
    ATTENTION + "q_a_layernorm.weight": (HF_ATTENTION + "q_a_layernorm.weight",),
    ATTENTION + "linear_q_up_proj.weight": (HF_ATTENTION + "q_b_proj.weight",),
    ATTENTION + "linear_kv_down_proj.weight": (HF_ATTENTION + "kv_a_proj_with_mqa.weight",),
    ATTENTION + "kv_a_layernorm.weight": (HF_ATTENTION + "kv_a_layernorm.weight",),
    ATTENTION + "linear_kv_up_proj.weight": (HF_ATTENTION + "kv_b_proj.weight",),
    # feed-forward
    LAYER + "pre_mlp_layernorm.weight": (HF_LAYER + "post_attention_layernorm.weight",),
    MLP + "linear_fc1.layer_norm_weight": (HF_LAYER + "post_attention_layernorm.weight",),
    **gated("", ""),
    # experts
    MLP + "router.weight": (HF_MLP + "gate.weight",),
    MLP + "router.expert_bias": (HF_MLP + "gate.e_score_correction_bias",),
    **gated("experts.experts.{expert}.", "experts.{expert}."),
    **gated("shared_experts.", "shared_experts."),
    # around layers for further tokens: see ``decoder_key``
    LAYER + "enorm.weight": (HF_LAYER + "enorm.weight",),
    LAYER + "hnorm.weight": (HF_LAYER + "hnorm.weight",),
    LAYER + "eh_proj.weight": (HF_LAYER + "eh_proj.weight",),
    LAYER + "final_layernorm.weight": (HF_LAYER + "shared_head.norm.weight",),
}

MTP_NAMES = re.compile(r"mtp\.layers\.(?P<depth>\d+)\.(transformer_layer\.)?")


def pattern(template: str) -> re.Pattern[str]:
    numbered = re.escape(template)
    for number in ("layer", "expert"):
        numbered = numbered.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>\d+)")
    return re.compile(numbered)


RULES = [(pattern(key), names) for key, names in TABLE.items()]
GATE_UP = [
    (f"{HF_MLP}{part}gate_proj.weight", f"{HF_MLP}{part}up_proj.weight")
    for part in ("", "experts.{expert}.", "shared_experts.")
]
FUSED = [names for names in TABLE.values() if len(names) > 1] + GATE_UP
"""Templates of what lies in one parameter: gate and up have keys of their own in a checkpoint alone."""
MEMBERS = [(pattern(member), members) for members in FUSED for member in members]
PRODUCED = [pattern(name) for name in sorted({name for names in TABLE.values() for name in names})]


def hf_names(key: str) -> tuple[str, ...]:
    """The Hugging Face tensors that the tensor ``key`` consists of, in the order in which their rows lie.

    ``key`` is a key of ``sharded_state_dict`` after ``apply_factories``; one without a rule is a bug: the
    parent process refuses models that would have one (``unknown``).
    """
    for rule, names in RULES:
        if found := rule.fullmatch(key):
            return tuple(name.format(**found.groupdict()) for name in names)
    raise AssertionError(f"{key}: the table of Hugging Face names has no rule for it")


def decoder_key(key: str, num_layers: int) -> str:
    """Layers for further tokens, which Megatron counts for themselves, as layers that follow the last one."""
    return MTP_NAMES.sub(lambda found: LAYER.format(layer=num_layers + int(found["depth"])), key)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of ``names`` (Hugging Face parameters) that no rule produces, in their order."""
    return [name for name in names if not any(rule.fullmatch(name) for rule in PRODUCED)]


def fused(names: Iterable[str]) -> list[list[str]]:
    """Those of ``names`` (Hugging Face parameters) that lie in one parameter of Megatron's: q, k and v."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        for part, members in MEMBERS:
            if found := part.fullmatch(name):
                key = tuple(member.format(**found.groupdict()) for member in members)
                groups.setdefault(key, []).append(name)
    return list(groups.values())
