"""The table of Hugging Face names holds the parameter names of transformers."""

from typing import Any

import pytest

from components.engines.megatron.hf_names import TABLE, hf_names, unknown
from components.models import ModelSpec, named_shapes

SMALL = {"num_hidden_layers": 11, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def names(kind: str, **fields: Any) -> list[str]:
    spec = ModelSpec(architecture={"model_type": kind, **SMALL, **fields})
    return list(named_shapes(spec.build(spec.config())))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_parameter_is_known(kind: str, tied: bool) -> None:
    assert unknown(names(kind, num_key_value_heads=2, tie_word_embeddings=tied)) == []


@pytest.mark.parametrize("rank", [8, None])
def test_every_parameter_of_latent_attention_is_known(rank: int | None) -> None:
    fields = {"num_key_value_heads": 4, "q_lora_rank": rank, "first_k_dense_replace": 11}
    assert unknown(names("deepseek_v3", **fields)) == []


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "model.layers.0.self_attn.o_proj.bias": ("llama", {"num_key_value_heads": 2, "attention_bias": True}),
    "model.layers.0.mlp.gate_proj.bias": ("llama", {"num_key_value_heads": 2, "mlp_bias": True}),
    "model.layers.0.pre_feedforward_layernorm.weight": ("gemma3_text", {"num_key_value_heads": 2}),
    "gpt_neox.embed_in.weight": ("gpt_neox", {}),
    "model.layers.0.self_attn.qkv_proj.weight": ("phi3", {"pad_token_id": 0}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_parameter_of_another_kind_is_named(name: str) -> None:
    kind, fields = UNKNOWN[name]
    every = names(kind, **fields)
    found = unknown(every)
    assert name in found
    assert found == [n for n in every if n in found], "in the model's order"


def test_no_rule_matches_a_part_of_a_name() -> None:
    assert unknown(["a.model.norm.weight", "model.norm.weight.b", "modelxnorm.weight"]) == [
        "a.model.norm.weight",
        "model.norm.weight.b",
        "modelxnorm.weight",
    ]
    assert unknown(["model.layers.x.mlp.up_proj.weight"]) == ["model.layers.x.mlp.up_proj.weight"]


def test_layers_keep_their_number() -> None:
    assert hf_names("decoder.layers.10.mlp.linear_fc1.weight_v") == ("model.layers.10.mlp.up_proj.weight",)


@pytest.mark.parametrize(
    ("local", "transformer_engine"),
    [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ],
)
def test_norms_are_the_same_inside_a_linear_layer(local: str, transformer_engine: str) -> None:
    keys = [f"decoder.layers.0.{key}" for key in (local, transformer_engine)]
    assert hf_names(keys[0]) == hf_names(keys[1])


def test_a_key_without_a_rule_is_named() -> None:
    with pytest.raises(AssertionError, match=r"decoder.layers.0.mlp.router.bias: the table"):
        hf_names("decoder.layers.0.mlp.router.bias")


def test_every_rule_can_be_reached() -> None:
    """No key matches the rule of another key."""
    for key, expected in TABLE.items():
        assert hf_names(key.format(layer=7, expert=3)) == tuple(
            name.format(layer=7, expert=3) for name in expected
        )
