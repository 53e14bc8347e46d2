"""Routers choose the same experts as the routers of transformers."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import components.engines.megatron.runtime  # noqa: F401  installs the patches
from components.engines.megatron.moe_config import read_moe_config
from components.engines.megatron.runtime.moe_router import choose_experts

QWEN = {"num_experts": 8, "mlp_only_layers": []}
DEEPSEEK = {"n_routed_experts": 8, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5}
ROUTERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen": (Qwen3MoeTopKRouter, "qwen3_moe", QWEN | {"num_experts_per_tok": 3, "norm_topk_prob": True}),
    "qwen, plain": (
        Qwen3MoeTopKRouter,
        "qwen3_moe",
        QWEN | {"num_experts_per_tok": 2, "norm_topk_prob": False},
    ),
    "qwen, one": (Qwen3MoeTopKRouter, "qwen3_moe", QWEN | {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    "mixtral": (MixtralTopKRouter, "mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        DEEPSEEK | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ),
    "deepseek, three of one group": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        DEEPSEEK | {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek, no groups": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        DEEPSEEK | {"num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_experts_with_the_same_weights(name: str) -> None:
    kind, family, fields = ROUTERS[name]
    config = AutoConfig.for_model(family, hidden_size=16, num_hidden_layers=2, **fields)
    experts, router = read_moe_config(config), kind(config)
    assert experts is not None
    draw = torch.Generator().manual_seed(0)
    router.weight.data = torch.randn(8, 16, generator=draw)
    bias = torch.randn(8, generator=draw) if experts.biased else None
    if bias is not None:
        router.e_score_correction_bias.copy_(bias)
    logits, their_weights, their_chosen = router(torch.randn(50, 16, generator=draw))
    _, chosen, weights = choose_experts(logits, experts, bias)
    expected = torch.zeros(50, 8).scatter(1, their_chosen, their_weights)
    torch.testing.assert_close(torch.zeros(50, 8).scatter(1, chosen, weights), expected)
