"""Estimates for models with experts: parameters, FLOPs, memory and communication."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron, pipeline_split
from components.models import ModelSpec
from components.optimizers import AdamW
from components.preflight import engine_layouts
from components.preflight.engine_layouts import comm_cost, memory_savers
from components.preflight.estimates.flops import matmul_sizes, train_flops
from components.preflight.estimates.parameter_counts import ParallelSizes, model_parameters, parameters
from components.preflight.estimates.quantities import (
    CommInputs,
    MemoryInputs,
    MicrobatchShape,
    ModelSize,
    RankMemory,
)
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from tests.distributed.cases import fsdp2, megatron
from tests.e2e.commands import composed

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
QWEN3 = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
    "head_dim": 8,
}
DEEPSEEK = BASE | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
FAMILIES = {
    "qwen3_moe": QWEN3,
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4},
    "deepseek_v3": DEEPSEEK,
}


def described(architecture: dict[str, Any]) -> Any:
    spec = ModelSpec(architecture=architecture)
    return spec.build(spec.config())


@pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)
def test_arithmetic_is_what_torch_counts(architecture: dict[str, Any]) -> None:
    """The FLOPs equal torch's count of transformers' model, whose experts compute only their own tokens."""
    fields, (rows, length) = dict(architecture), (2, 24)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.randint(96, (rows, length)), use_cache=False).logits.sum().backward()
    sizes = {"num_tokens": rows * length, "num_labels": rows * length}
    found = train_flops(
        matmul_sizes(described(architecture)), sum_squared_seqlens=2 * rows * length**2, **sizes
    )
    # Routers are a thousandth of the FLOPs, and rotary angles are negligible.
    assert found == pytest.approx(counter.get_total_flops(), rel=3e-3)


@pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)
def test_ranks_hold_the_experts_between_them(architecture: dict[str, Any]) -> None:
    model = described(architecture)
    whole = {p.name: p for p in model_parameters(model)}
    assert sum(p.numel for p in whole.values()) == sum(p.numel() for p in model.parameters())
    experts = {name for name, p in whole.items() if p.of_experts}
    assert len(experts) == 3 * (3 if architecture["model_type"] == "mixtral" else 2)
    assert not any("shared" in name for name in experts)
    for p in parameters(model, ParallelSizes(tp=1, ep=2, etp=2)):
        assert p.numel * (4 if p.of_experts else 1) == whole[p.name].numel


def large(*overrides: str) -> tuple[Experiment, Any]:
    made = build_experiment(composed(("run.name=x", "model=qwen3_30b_a3b", *overrides)), ConfigSources())
    return made, made.model.build(made.model.config())


@pytest.fixture(scope="module")
def qwen3_30b() -> tuple[Experiment, Any]:
    return large()


def memory(layout: FSDP2 | Megatron, world_size: int, found: tuple[Experiment, Any]) -> list[RankMemory]:
    step = MemoryInputs(
        world_size=world_size,
        dtype=torch.bfloat16,
        device="cuda",
        microbatch=MicrobatchShape(rows=1, length=4096, labels=4096, num_microbatches=4),
        loss=found[0].stage,
        reference="none",
    )
    return engine_layouts.memory(layout, found[1], AdamW(lr=1e-3, weight_decay=0.0), step)


TOTAL, OF_EXPERTS = 30_532_122_624, 48 * 128 * 3 * 2048 * 768


def test_the_published_sizes(qwen3_30b: tuple[Experiment, Any]) -> None:
    found = model_parameters(qwen3_30b[1])
    assert sum(p.numel for p in found) == TOTAL
    assert sum(p.numel for p in found if p.of_experts) == OF_EXPERTS
    active = TOTAL - OF_EXPERTS * 120 // 128
    assert 3.3e9 < active < 3.4e9
    # The linear sizes hold all active parameters except norms, the embedding (a lookup) and the head.
    sizes = matmul_sizes(qwen3_30b[1])
    assert active - sizes.linear - 2 * sizes.head == pytest.approx(0, abs=1e6)


def test_megatron_shares_experts_and_their_state(qwen3_30b: tuple[Experiment, Any]) -> None:
    dealt = megatron(dp=8, ep=8, distributed_optimizer=True)
    (rank,) = memory(dealt, 8, qwen3_30b)
    plain = TOTAL - OF_EXPERTS
    assert rank.parts["weights"] == 2 * (plain + OF_EXPERTS // 8)
    assert rank.parts["gradients"] >= 4 * (plain + OF_EXPERTS // 8)
    # Each expert is on one rank only, so its moments are not sharded further.
    assert rank.parts["moments"] == 8 * (plain // 8 + OF_EXPERTS // 8)
    wider = megatron(dp=32, ep=8, distributed_optimizer=True)
    (rank,) = memory(wider, 32, qwen3_30b)
    assert rank.parts["moments"] == 8 * (plain // 32 + OF_EXPERTS // 32)


def test_fsdp2_gathers_the_experts_of_its_own(qwen3_30b: tuple[Experiment, Any]) -> None:
    whole, dealt = memory(fsdp2(8), 8, qwen3_30b)[0], memory(fsdp2(8, ep=8), 8, qwen3_30b)[0]
    assert dealt.parts["weights"] == whole.parts["weights"] == 4 * TOTAL // 8
    assert dealt.parts["gathered"] < whole.parts["gathered"]
    assert dealt.total < whole.total


def test_stages_have_layers_of_their_own_kind() -> None:
    model = described(DEEPSEEK | {"num_hidden_layers": 4})
    step = MemoryInputs(
        world_size=2,
        dtype=torch.float32,
        device="cpu",
        microbatch=MicrobatchShape(rows=1, length=64, labels=64, num_microbatches=2),
        loss=large()[0].stage,
        reference="none",
    )
    first, last = engine_layouts.memory(megatron(pp=2), model, AdamW(lr=1e-3, weight_decay=0.0), step)
    numel = {n: sum(p.numel() for p in layer.parameters()) for n, layer in enumerate(model.model.layers)}
    ends = 96 * 32
    assert first.parts["weights"] == 4 * (numel[0] + numel[1] + ends)
    assert last.parts["weights"] == 4 * (numel[2] + numel[3] + ends + 32)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pp": 2}, [[0, 1, 2, 3], [4, 5, 6, 7, 8]]),
        ({"pp": 2, "vpp": 2}, [[0, 1, 4, 5], [2, 3, 6, 7, 8]]),
        ({"pp": 2, "vpp": 2, "pipeline_layout": "Et|ttt|t*3|tL"}, [[0, 4, 5, 6], [1, 2, 3, 7, 8]]),
    ],
    ids=str,
)
def test_which_layers_stages_hold(sizes: dict[str, Any], expected: list[list[int]]) -> None:
    assert pipeline_split.numbered(megatron(**sizes), 8, mtp=1) == expected


SIZE = ModelSize(
    parameters=1000,
    trained=1000,
    layers=6,
    hidden=64,
    q_width=64,
    kv_width=32,
    kv_heads=2,
    experts=800,
    trained_experts=800,
    num_moe_layers=4,
    top_k=2,
)


EXPERTS: dict[str, Any] = {"activation_checkpointing": "selective", "recompute_modules": ("moe",)}


def sent(layout: FSDP2 | Megatron, world_size: int, size: ModelSize = SIZE) -> dict[str, float]:
    cost = comm_cost(
        layout,
        size,
        CommInputs(world_size, torch.bfloat16, tokens=512.0, num_microbatches=3),
    )
    return {each.dimension: each.num_bytes for each in cost.volumes}


def test_tokens_go_to_their_experts_and_back() -> None:
    copies = 512 * 2 * 64 * 2  # each token goes to two experts, half of which are on other ranks
    assert sent(fsdp2(4, ep=2), 4)["ep"] == 4 * 4 * copies / 2
    assert sent(fsdp2(2, cp=2, ep=2), 4)["ep"] == 4 * 4 * copies / 2 / 2
    full = fsdp2(4, ep=2, activation_checkpointing="full")
    assert sent(full, 4)["ep"] == 6 * 4 * copies / 2
    assert sent(megatron(dp=4, ep=4), 4)["ep"] == 4 * 4 * copies * 3 / 4
    # Each of the two tp ranks sends half of the tokens.
    assert sent(megatron(dp=2, tp=2, ep=2, sequence_parallel=True), 4)["ep"] == 4 * 4 * copies / 2 / 2


def test_gathered_tokens_and_padding_are_sent_too() -> None:
    """The all-gather sends whole tokens in bf16 and gets results in fp32, for each copy once."""
    gathered = megatron(dp=4, ep=4, moe_token_dispatcher="allgather")
    assert sent(gathered, 4)["ep"] == 2 * 4 * (3 / 4 * 4 * 512 * 64) * (2 + 4)
    padded = megatron(dp=4, ep=4, capacity_factor=1.5, moe_pad_to_capacity=True)
    assert sent(padded, 4)["ep"] == 1.5 * sent(megatron(dp=4, ep=4), 4)["ep"]
    step = CommInputs(4, torch.bfloat16, tokens=512.0, num_microbatches=3)
    assert comm_cost(padded, SIZE, step).padding == 0.5


def test_recomputed_experts_exchange_their_tokens_again() -> None:
    tp2ep2: dict[str, Any] = {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}
    shared = replace(SIZE, has_shared_experts=True)
    for plain, again in (
        (fsdp2(2, tp=2, ep=2), fsdp2(2, tp=2, ep=2, **EXPERTS)),
        (megatron(**tp2ep2), megatron(**tp2ep2, **EXPERTS)),
    ):
        assert sent(again, 4)["ep"] == 1.5 * sent(plain, 4)["ep"]
        assert sent(again, 4)["tp"] == sent(plain, 4)["tp"]
        added = sent(again, 4, shared)["tp"] - sent(plain, 4, shared)["tp"]
        assert added == SIZE.num_moe_layers * 2 * 0.5 * 512 * 64 * 2
    split = {"dp": 2, "etp": 2}
    assert sent(megatron(**split, **EXPERTS), 2)["etp"] == 1.5 * sent(megatron(**split), 2)["etp"]


def test_gradients_are_added_up_where_experts_are_the_same() -> None:
    found = sent(megatron(dp=4, ep=2), 4)
    assert found["dp"] == pytest.approx(2 * (3 / 4 * 200 + 1 / 2 * 400) * 4)
    assert sent(megatron(dp=4, ep=4), 4)["dp"] == pytest.approx(2 * 3 / 4 * 200 * 4)
    gathers, scatter = 3 * 2 * 2, 4
    assert sent(fsdp2(4, ep=2), 4)["dp_shard"] == pytest.approx(
        (3 / 4 * 200 + 1 / 2 * 400) * (gathers + scatter)
    )


def test_what_is_proposed_deals_out_experts() -> None:
    assert {"ep": 4} in memory_savers(fsdp2(8, ep=2), 8)
    assert {"reduce_gradients": "every"} in memory_savers(fsdp2(8), 8)
    for layout in (fsdp2(8, **EXPERTS), megatron(dp=8, **EXPERTS)):  # full does not read the modules
        assert {"activation_checkpointing": "full", "recompute_modules": None} in memory_savers(layout, 8)
    assert {"reduce_gradients": "every"} not in memory_savers(fsdp2(8, reduce_gradients="every"), 8)
    assert {"ep": 16} not in memory_savers(fsdp2(8, ep=8), 8)
    assert {"ep": 4} in memory_savers(megatron(dp=8, ep=2), 8)
    assert not any(keys.get("dp") == 4 and "pp" in keys for keys in memory_savers(megatron(dp=8, ep=8), 8))
