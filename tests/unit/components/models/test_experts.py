"""Experts are stored one by one under their names on disk, although transformers stacks them in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.contracts.errors import ConfigError
from components.models import ModelSpec, named_shapes, stream_folder
from components.models.experts import ExpertList, moe_blocks, router_biases
from components.models.moe_loss_config import MoELossConfig

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}


def spec_of(family: str, **changes: Any) -> ModelSpec:
    return ModelSpec(architecture={"model_type": family, **SMALL, **FAMILIES[family]}, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_and_writes_the_same_files(family: str, tmp_path: Path) -> None:
    """transformers reads our files without missing or unexpected tensors, and writes equal ones again."""
    spec, ours, theirs = spec_of(family), tmp_path / "ours", tmp_path / "theirs"
    model, weights = spec.build(spec.config()), spec.weights(0)
    stream_folder(spec, named_shapes(model), weights, ours, torch.float32)
    loaded, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(info.values()), info
    loaded.save_pretrained(theirs)
    stored, again = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    read = ModelSpec(path=str(theirs), init="pretrained").weights(0)
    assert all(torch.equal(read(name), weights(name)) for name in named_shapes(model))


def test_mixtral_has_its_own_names_on_disk(tmp_path: Path) -> None:
    spec = spec_of("mixtral")
    stream_folder(spec, named_shapes(spec.build(spec.config())), spec.weights(0), tmp_path, torch.float32)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert not any(".mlp." in name for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_stacked_files_are_read_too(family: str, tmp_path: Path) -> None:
    """A folder that stores experts stacked, as transformers holds them in memory, is read."""
    spec, first = spec_of(family), tmp_path / "first"
    model, weights = spec.build(spec.config()), spec.weights(0)
    stream_folder(spec, named_shapes(model), weights, first, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(first)
    stacked = {name: tensor.contiguous() for name, tensor in loaded.state_dict().items()}
    save_file(stacked, first / "model.safetensors", metadata={"format": "pt"})
    read = ModelSpec(path=str(first), init="pretrained").weights(0)
    assert all(torch.equal(read(name), weights(name)) for name in named_shapes(model))


def test_an_expert_starts_the_same_whatever_is_beside_it() -> None:
    four, eight = spec_of("qwen3_moe"), spec_of("qwen3_moe")
    assert eight.architecture is not None
    eight.architecture["num_experts"] = 8
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(four.weights(5)(name), eight.weights(5)(name))
    assert four.weights(5)(name).std() == pytest.approx(0.02, rel=0.2)


def test_layers_of_further_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    """Layers beyond the configured number are not read, such as the MTP layer in DeepSeek's files."""
    spec = spec_of("deepseek_v3")
    model, weights = spec.build(spec.config()), spec.weights(0)
    stream_folder(spec, named_shapes(model), weights, tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"model.layers.2.enorm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    read = ModelSpec(path=str(tmp_path), init="pretrained").weights(0)
    assert all(torch.equal(read(name), weights(name)) for name in named_shapes(model))


def test_routers_have_biases_that_no_gradient_changes() -> None:
    spec = spec_of("deepseek_v3")
    model = spec.build(spec.config())
    assert list(router_biases(model)) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert not any(bias.requires_grad for bias in router_biases(model).values())
    assert list(moe_blocks(model)) == ["model.layers.1.mlp"]
    assert len([m for m in model.modules() if isinstance(m, ExpertList)]) == 1
    assert torch.equal(spec.weights(0)("model.layers.1.mlp.gate.e_score_correction_bias"), torch.zeros(4))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"moe": MoELossConfig("switch")}, "model.moe.aux_loss_coef: is 0"),
        ("qwen3_moe", {"moe": MoELossConfig(aux_loss_coef=0.1)}, "model.moe.aux_loss: is none"),
        (
            "qwen3_moe",
            {"moe": MoELossConfig(bias_update_rate=0.1)},
            "model.moe.bias_update_rate: the routers of qwen3_moe have no bias",
        ),
    ],
)
def test_terms_that_would_do_nothing_are_refused(family: str, changes: Any, message: str) -> None:
    spec = spec_of(family, **changes)
    with pytest.raises(ConfigError, match=message):
        spec.build(spec.config())


def test_a_dense_model_has_no_routers_to_balance() -> None:
    spec = ModelSpec(architecture={"model_type": "qwen3", **SMALL}, moe=MoELossConfig(z_loss_coef=0.1))
    with pytest.raises(ConfigError, match=r"model\.moe\.z_loss_coef: qwen3 has no experts"):
        spec.build(spec.config())


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        (MoELossConfig("sequence", 0.1), False),
        (MoELossConfig("switch", 0.1), True),
        (MoELossConfig("global_batch", 0.1), True),
        (MoELossConfig(z_loss_coef=0.1), False),
    ],
)
def test_which_losses_depend_on_the_microbatch_size(moe: MoELossConfig, expected: bool) -> None:
    assert moe.depends_on_microbatches == expected


def test_families_that_were_not_compared_are_refused() -> None:
    spec = ModelSpec(architecture={"model_type": "olmoe", **SMALL})
    with pytest.raises(ConfigError, match="with experts that the engines train are deepseek_v3, mixtral"):
        spec.config()
