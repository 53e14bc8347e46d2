"""The mapping from tensors of Megatron's own checkpoint format to Hugging Face tensors.

The keys of ``TABLE`` are those of ``GPTModel.sharded_state_dict``, in which layers are numbered over all
pipeline stages and gate and up have separate keys (``_w``, ``_v``). The keys are the same for Megatron's
local layers and for those of transformer-engine, except the keys of norms, which transformer-engine keeps in
the linear layer that follows.
"""

import re
from collections.abc import Iterable

from components.models.experts import EXPERT_PARAM

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
ATTENTION, HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."
MLP, HF_MLP = LAYER + "mlp.", HF_LAYER + "mlp."


def gated(part: str, hf_part: str) -> dict[str, tuple[str, ...]]:
    """Return the rules for the three matrices of a layer's MLP, or of one of its experts."""
    return {
        f"{MLP}{part}linear_fc1.weight_w": (f"{HF_MLP}{hf_part}gate_proj.weight",),
        f"{MLP}{part}linear_fc1.weight_v": (f"{HF_MLP}{hf_part}up_proj.weight",),
        f"{MLP}{part}linear_fc2.weight": (f"{HF_MLP}{hf_part}down_proj.weight",),
    }


def qkv(leaf: str) -> tuple[str, ...]:
    """Return the parts of Megatron's fused projection: the q, k and v rows of each query group in turn."""
    return tuple(f"{HF_ATTENTION}{letter}_proj.{leaf}" for letter in "qkv")


TABLE: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "score.weight": ("score.weight",),  # a scalar head, in place of the output layer
    # attention
    LAYER + "input_layernorm.weight": (HF_LAYER + "input_layernorm.weight",),
    ATTENTION + "linear_qkv.layer_norm_weight": (HF_LAYER + "input_layernorm.weight",),
    ATTENTION + "linear_qkv.weight": qkv("weight"),
    ATTENTION + "linear_qkv.bias": qkv("bias"),
    ATTENTION + "q_layernorm.weight": (HF_ATTENTION + "q_norm.weight",),
    ATTENTION + "k_layernorm.weight": (HF_ATTENTION + "k_norm.weight",),
    ATTENTION + "linear_proj.weight": (HF_ATTENTION + "o_proj.weight",),
    # multi-head latent attention
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
    # parts that only MTP layers have: see ``decoder_key``
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
"""Templates of the names whose tensors Megatron fuses into one parameter. Gate and up have separate keys only
in a checkpoint."""
MEMBERS = [(pattern(member), members) for members in FUSED for member in members]
PRODUCED = [pattern(name) for name in sorted({name for names in TABLE.values() for name in names})]


def hf_names(key: str) -> tuple[str, ...]:
    """Return the names of the Hugging Face tensors that form the tensor ``key``, in the order of its rows.

    ``key`` is a key of ``sharded_state_dict`` after ``apply_factories``. A key without a rule is a bug,
    because the parent process refuses models that would have one (see ``unknown``).
    """
    for rule, names in RULES:
        if found := rule.fullmatch(key):
            return tuple(name.format(**found.groupdict()) for name in names)
    raise AssertionError(f"{key}: the table of Hugging Face names has no rule for it")


def decoder_key(key: str, num_layers: int) -> str:
    """Return ``key`` with its MTP layer, if any, renumbered as a layer after the last decoder layer.

    Megatron numbers MTP layers separately.
    """
    return MTP_NAMES.sub(lambda found: LAYER.format(layer=num_layers + int(found["depth"])), key)


def unknown(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` (Hugging Face parameters) that no rule produces, in the given order."""
    return [name for name in names if not any(rule.fullmatch(name) for rule in PRODUCED)]


def fused(names: Iterable[str], *, stacked: bool) -> list[list[str]]:
    """Group those ``names`` of Hugging Face parameters that Megatron fuses into one, such as q, k and v.

    ``stacked`` means that the experts of a layer are fused too: all gate and up, and all down.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        if stacked and (found := EXPERT_PARAM.fullmatch(name)):
            is_down = found["leaf"].startswith("down_proj")
            groups.setdefault((found["experts"], "down" if is_down else "gate and up"), []).append(name)
            continue
        for part, members in MEMBERS:
            if found := part.fullmatch(name):
                key = tuple(member.format(**found.groupdict()) for member in members)
                groups.setdefault(key, []).append(name)
    return list(groups.values())
