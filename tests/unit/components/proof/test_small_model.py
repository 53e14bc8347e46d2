"""A small model keeps the kinds of layers and the groups of heads, and its layout can split it."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.models import ModelSpec
from components.proof.small_layout import SIZES
from components.proof.small_model import Limits, small_config

LIMITS = Limits(layers=4, hidden=64, vocabulary=512, max_length=128)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GROUPS = {"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
LLAMA = {"model_type": "llama", "num_hidden_layers": 30, "head_dim": 32, "attention_dropout": 0.1} | GROUPS
MOE = {"num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "mlp_only_layers": [6, 17]}
QWEN_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 24, "head_dim": 64, "decoder_sparse_step": 2}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 26, "head_dim": 32, "sliding_window": 64}
LATENT = {
    "q_lora_rank": 96,
    "kv_lora_rank": 72,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
DEEPSEEK = {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "num_hidden_layers": 61, "n_group": 8}
DEEPSEEK |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "topk_group": 4, "rope_parameters": ROPE}


def small(folder: Path, architecture: dict[str, Any], limits: Limits = LIMITS, **sizes: int) -> Any:
    """Return the configuration of the small model, after transformers has built it."""
    config = ModelSpec(architecture=architecture).config()
    fields = small_config(config, limits, dict.fromkeys(SIZES, 1) | sizes)
    (folder / "config.json").write_text(json.dumps(fields))
    return ModelSpec(path=str(folder), architecture=None, init="random").meta_model.config


def test_widths_that_tensor_and_context_parallel_ranks_can_split(tmp_path: Path) -> None:
    found = small(tmp_path, LLAMA, tp=4, cp=2, pp=3)
    assert (found.num_hidden_layers, found.hidden_size, found.vocab_size) == (6, 64, 512)
    assert (found.num_key_value_heads, found.num_attention_heads) == (8, 16)
    assert found.head_dim == 32
    assert found.attention_dropout == 0
    found = small(tmp_path, LLAMA | {"num_key_value_heads": 2}, cp=4)
    assert (found.num_key_value_heads, found.num_attention_heads) == (1, 4)
    found = small(tmp_path, LLAMA)
    assert (found.num_key_value_heads, found.num_attention_heads) == (1, 2)


def test_no_limit_means_as_composed(tmp_path: Path) -> None:
    found = small(tmp_path, LLAMA, Limits(None, None, None, None), pp=2)
    assert (found.num_hidden_layers, found.hidden_size, found.vocab_size) == (30, 1024, 4096)
    assert found.num_attention_heads == 16


def test_layers_of_both_kinds_of_attention(tmp_path: Path) -> None:
    found = small(tmp_path, GEMMA | GROUPS)
    assert found.layer_types == ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("layers", [2, 4])
def test_dense_layers_among_experts(tmp_path: Path, layers: int) -> None:
    """Layers 1, 3, 5 ... have experts, except 17, so that 0 and 1 come first."""
    found = small(tmp_path, QWEN_MOE | MOE | GROUPS, Limits(layers, 64, 512, 128), ep=16)
    assert found.mlp_only_layers == list(range(0, layers, 2))
    assert found.decoder_sparse_step == 1
    assert found.num_local_experts == 16
    assert found.num_experts_per_tok == 4


def test_latent_attention_and_groups_of_experts(tmp_path: Path) -> None:
    found = small(tmp_path, DEEPSEEK | GROUPS | LATENT | {"num_key_value_heads": 16}, tp=2)
    assert found.first_k_dense_replace == 3
    assert found.n_routed_experts == 16
    assert (found.q_lora_rank, found.kv_lora_rank, found.num_attention_heads) == (64, 64, 2)
