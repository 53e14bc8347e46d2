"""Memory estimates are compared with the model's parameters and each other; nothing is built or run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MistralConfig,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
)

from components.engines.megatron import pipeline_split
from components.engines.shared.sdpa import additive_mask, packed_sdpa
from components.preflight.engine_layouts import EngineLayout, memory
from components.preflight.estimates import activation_memory
from components.preflight.estimates.activation_memory import RunShape, head_activations, mask_bytes
from components.preflight.estimates.model_shape import (
    dense_mlp,
    has_layer_norms,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory
from runner.config.instantiate import Experiment, build_experiment
from runner.config.sources import ConfigSources
from tests.distributed.cases import megatron
from tests.e2e.commands import composed

WORKLOAD = MicrobatchShape(rows=1, length=4096, labels=4096, num_microbatches=16)


def experiment(*overrides: str) -> Experiment:
    return build_experiment(composed(("run.name=memory", *overrides)), ConfigSources())


def estimate(*overrides: str, **options: Any) -> list[RankMemory]:
    """Return the estimated memory of the ranks on GPUs, in bf16 unless ``options`` say otherwise."""
    made = experiment("run.dtype=bf16", *overrides)
    asked: dict[str, Any] = {"microbatch": WORKLOAD, "reference": "none", "adapter": made.adapter}
    asked |= {"dtype": torch.bfloat16}
    step = MemoryInputs(
        world_size=made.parallelism.world_size({}, 0),
        device="cuda",
        loss=made.stage,
        **asked | options,
    )
    assert isinstance(made.parallelism, EngineLayout)
    return memory(made.parallelism, made.model.build(made.model.config()), made.optimizer, step)


def test_stages_hold_the_model_between_them() -> None:
    layout = ("parallelism=megatron", "parallelism.tp=8", "parallelism.pp=4", "parallelism.dp=16")
    found = estimate("model=llama3_70b", *layout, "parallelism.distributed_optimizer=true")
    made = experiment("model=llama3_70b").model
    numel = sum(p.numel() for p in made.build(made.config()).parameters())
    assert [rank.stage for rank in found] == [0, 1, 2, 3]
    # Every tp rank holds whole norms.
    assert 8 * sum(rank.parts["weights"] for rank in found) == pytest.approx(2 * numel, rel=1e-3)
    assert 8 * 16 * sum(rank.parts["moments"] for rank in found) == pytest.approx(8 * numel, rel=1e-3)
    # 1F1B: a stage holds as many micro-batches as there are stages from it to the last.
    assert found[0].parts["activations"] > 1.9 * found[2].parts["activations"]


@pytest.mark.parametrize("layout", ["fsdp2", "tp2pp2"])
def test_fp16_needs_the_memory_of_bf16(layout: str) -> None:
    chosen = ("model=qwen3_0_6b", f"parallelism={layout}")
    assert estimate(*chosen, dtype=torch.float16) == estimate(*chosen)


def test_transformer_engine_keeps_two_copies_of_layers_in_float8() -> None:
    made = experiment("model=qwen3_0_6b").model
    model = made.build(made.config())
    chosen = ("model=qwen3_0_6b", "parallelism=pp2", "stage=dpo")
    asked: dict[str, Any] = {"reference": "frozen"}
    plain, rounded = (estimate(*chosen, **asked, float8=yes) for yes in (False, True))
    added = [
        sum(two.parts[name] - one.parts[name] for one, two in zip(plain, rounded, strict=True))
        for name in ("weights", "reference")
    ]
    assert added == [2 * sum(p.numel() for p in model.model.layers.parameters())] * 2


def test_shards_hold_the_model_between_them() -> None:
    (rank,) = estimate("model=llama3_8b", "parallelism=fsdp2", "parallelism.dp=8")
    made = experiment("model=llama3_8b").model
    numel = sum(p.numel() for p in made.build(made.config()).parameters())
    assert 8 * rank.parts["weights"] == 4 * numel
    assert 8 * rank.parts["moments"] == 8 * numel


@pytest.mark.parametrize("layout", ["fsdp2", "megatron"])
@pytest.mark.parametrize(
    "less",
    [
        ("parallelism.activation_checkpointing=full",),
        ("parallelism.activation_checkpointing=selective",),
        ("parallelism.activation_checkpointing=selective", "parallelism.recompute_modules=[mlp]"),
        ("parallelism.tp=2",),
        ("parallelism.cp=2",),
        ("adapter=lora",),
        ("optimizer=sgd",),
    ],
    ids=" ".join,
)
def test_what_saves_memory(layout: str, less: tuple[str, ...]) -> None:
    before, after = (
        sum(
            estimate("model=qwen3_0_6b", f"parallelism={layout}", "parallelism.dp=1", *more)[0].parts.values()
        )
        for more in ((), less)
    )
    assert after < before


def test_what_is_offloaded_is_in_host_memory() -> None:
    (rank,) = estimate("parallelism=fsdp2", "parallelism.cpu_offload=true")
    assert set(rank.host) == {"weights", "moments", "gradients"}
    assert rank.host["moments"] == 2 * rank.host["gradients"]
    assert not {"weights", "moments"} & set(rank.parts)


def test_megatron_keeps_master_weights_on_the_gpu_if_its_optimizer_is_offloaded() -> None:
    """Their copies in host memory, which the optimizer updates, come on top."""
    layout = ("model=llama3_8b", "parallelism=megatron", "parallelism.dp=8")
    sharded = (*layout, "parallelism.distributed_optimizer=true")
    (here,), (offloaded,) = (
        estimate(*sharded, *more) for more in ((), ("parallelism.optimizer_cpu_offload=true",))
    )
    masters = here.parts["masters"]
    assert offloaded.parts["masters"] == masters
    assert offloaded.host == {"masters": masters, "moments": 2 * masters, "gradients": masters}
    assert here.total - offloaded.total <= here.parts["moments"]
    assert "moments" not in offloaded.parts


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        (("parallelism.optimizer_cpu_offload=true",), 1.0),
        (("parallelism.optimizer_cpu_offload=true", "parallelism.pp=2"), 1.0),
        (("parallelism.optimizer_cpu_offload=true", "parallelism.pp=2", "parallelism.vpp=2"), 0.5),
    ],
    ids=str,
)
def test_the_peak_may_be_while_the_optimizer_is_built(layout: tuple[str, ...], copied: float) -> None:
    """Parameters are copied into a buffer, chunk by chunk, with the gradient buffer already there."""
    sharded = ("parallelism=megatron", "parallelism.dp=8", "parallelism.distributed_optimizer=true")
    short = MicrobatchShape(rows=1, length=64, labels=64, num_microbatches=16)
    for rank in estimate("model=llama3_70b", *sharded, *layout, microbatch=short):
        weights = rank.parts["weights"]
        assert set(rank.parts) == {"weights", "gradients", "buffers"}
        assert rank.parts["gradients"] == 2 * weights
        assert rank.parts["buffers"] == pytest.approx(copied * weights, rel=0.15)


def test_experts_are_copied_after_the_other_parameters() -> None:
    sharded = ("parallelism=megatron", "parallelism.dp=64", "parallelism.distributed_optimizer=true")
    offloaded = ("parallelism.ep=8", "parallelism.optimizer_cpu_offload=true", "model=qwen3_30b_a3b")
    short = MicrobatchShape(rows=1, length=64, labels=64, num_microbatches=16)
    (rank,) = estimate(*sharded, *offloaded, microbatch=short)
    assert 0.5 * rank.parts["weights"] < rank.parts["buffers"] < 0.9 * rank.parts["weights"]


def test_a_frozen_reference_is_a_second_copy() -> None:
    (rank,) = estimate("model=llama3_8b", "stage=dpo", "parallelism=fsdp2", reference="frozen")
    assert rank.parts["reference"] == rank.parts["weights"] // 2


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pp": 1}, [["EttttttttL"]]),
        ({"pp": 2}, [["Etttt"], ["ttttL"]]),
        ({"pp": 2, "vpp": 2}, [["Ett", "tt"], ["tt", "ttL"]]),
        ({"pp": 2, "first_stage_layers": 2}, [["Ett"], ["ttttttL"]]),
        ({"pp": 4, "first_stage_layers": 1, "last_stage_layers": 3}, [["Et"], ["tt"], ["tt"], ["tttL"]]),
        ({"pp": 2, "vpp": 2, "pipeline_layout": "Et|ttt|t*3|tL"}, [["Et", "ttt"], ["ttt", "tL"]]),
    ],
    ids=str,
)
def test_what_stages_hold(sizes: dict[str, Any], expected: list[list[str]]) -> None:
    layout = megatron(**sizes)
    pipeline_split.check_stages(layout, 8)
    assert pipeline_split.chunk_layers(layout, 8) == expected


@pytest.mark.parametrize(
    ("dtype", "length", "options"),
    [
        *((torch.float32, length, {}) for length in (1, 128, 129, 500, 767)),
        (torch.bfloat16, 767, {}),
        (torch.bfloat16, 256, {"sliding_window": 100}),
        (torch.bfloat16, 767, {"sliding_window": 766}),
        (torch.bfloat16, 767, {"sliding_window": 767}),
        (torch.bfloat16, 767, {"attention_dropout": 0.1}),
    ],
    ids=str,
)
def test_masks_are_those_that_attention_makes(
    dtype: torch.dtype, length: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def recorded(*arguments: Any) -> torch.Tensor:
        made.append(additive_mask(*arguments))
        return made[-1]

    monkeypatch.setattr("components.engines.shared.sdpa.additive_mask", recorded)
    inputs = (torch.randn(1, 2, length, 8, dtype=dtype) for _ in range(3))
    config = MistralConfig(hidden_size=16, num_attention_heads=2, **{"sliding_window": None} | options)
    dropout = config.attention_dropout
    packed_sdpa(*inputs, [length], window=config.sliding_window, scale=None, dropout=dropout)
    found = mask_bytes(row(length), RunShape(dtype, "cpu", "none"), config)
    assert found == sum(mask.nbytes for mask in made)


def row(length: int, longest: int | None = None) -> MicrobatchShape:
    return replace(WORKLOAD, length=length, longest_sequence=longest)


def test_masks_of_a_packed_row_are_at_most_those_that_are_estimated() -> None:
    """A row of 1024 tokens may be one sequence without a mask, or two that each have one."""
    config = MistralConfig(hidden_size=16, num_attention_heads=2, sliding_window=None)
    shape = RunShape(torch.float32, "cpu", "none")
    assert mask_bytes(row(1024), shape, config) == 2 * mask_bytes(row(512), shape, config) > 0


def test_attention_without_the_kernel_for_packed_rows_saves_more() -> None:
    """In padded rows and with dropout, every head of queries has keys of its own, and a window is a mask."""
    model = ("model=qwen3_0_6b", "parallelism.activation_checkpointing=none")
    dropout = "+model.architecture.attention_dropout=0.1"
    config = MistralConfig(sliding_window=100)
    masks = [
        mask_bytes(row(512), RunShape(torch.bfloat16, "cuda", "none", packed=on), config)
        for on in (True, False)
    ]
    assert masks == [0, 512 * 512 * 2]
    kinds = ["sliding_attention", "full_attention"]
    half = Qwen3Config(sliding_window=100, use_sliding_window=True, layer_types=kinds, num_hidden_layers=2)
    kept, again = (RunShape(torch.float32, "cuda", how) for how in ("none", "full"))
    assert [mask_bytes(row(512, n), kept, half) for n in (100, 128)] == [0, 512 * 128 * 4 // 2]
    assert mask_bytes(row(512, 128), again, half) == 512 * 128 * 4
    for engine in ("fsdp2", "megatron"):
        sizes = [
            estimate(*model, f"parallelism={engine}", *more, **options)[0].parts["activations"]
            for more, options in (((), {}), ((), {"packed": False}), ((dropout,), {}))
        ]
        # One padded row of Megatron is computed as a packed one.
        assert sizes[0] == sizes[1] if engine == "megatron" else sizes[0] < sizes[1]
        assert sizes[0] < sizes[2]
        two = replace(WORKLOAD, rows=2)
        packed, padded = (
            estimate(*model, f"parallelism={engine}", microbatch=two, packed=on)[0].total
            for on in (True, False)
        )
        assert packed < padded


def test_averages_of_weights_are_where_the_engine_keeps_its_weights() -> None:
    """A rank averages what it writes to checkpoints: its shard of the fp32 weights, or its share of them."""
    made = experiment("model=llama3_8b").model
    numel = sum(p.numel() for p in made.build(made.config()).parameters())
    sharded = ("parallelism=megatron", "parallelism.distributed_optimizer=true")
    layouts = [
        (("parallelism=fsdp2",), "parts"),
        (("parallelism=fsdp2", "parallelism.cpu_offload=true"), "host"),
        (sharded, "parts"),
        ((*sharded, "parallelism.optimizer_cpu_offload=true"), "host"),
        (("parallelism=megatron",), "host"),
    ]
    for layout, place in layouts:
        chosen = ("model=llama3_8b", *layout, "parallelism.dp=8")
        (plain,), (averaged,) = estimate(*chosen), estimate(*chosen, weight_copies=1)
        new = getattr(averaged, place)["averages"]
        assert 8 * new == pytest.approx(4 * numel, rel=1e-3), layout
        assert averaged.total - plain.total == (new if place == "parts" else 0), layout
    (whole,) = estimate("parallelism=megatron", "optimizer=muon", weight_copies=1)
    assert whole.parts["averages"] == whole.parts["masters"]


def test_the_head_is_copied_where_products_are_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = RunShape(torch.bfloat16, "cpu", "none"), []
    for needed in (True, False):
        monkeypatch.setattr(activation_memory, "needs_fp32_products", lambda *_, needed=needed: needed)
        found.append(head_activations(labels=3, hidden=5, vocabulary=7, run=run, trained=False))
    converted, plain = found
    assert converted == plain | {"converted": 4 * 5 * 7}
    assert plain["converted"] == 0


def test_the_shape_of_a_model_is_that_of_its_text_decoder() -> None:
    """The image encoder of Gemma 3 has torch's norms and MLPs without a gate; Phi's heads have such norms."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = {**small, "num_key_value_heads": 2, "head_dim": 32}
    with torch.device("meta"):
        gemma = Gemma3ForConditionalGeneration(Gemma3Config(text_config=texts, vision_config=small))
        phi = PhiForCausalLM(PhiConfig(**small, qk_layernorm=True))
        arcee = {
            name: ArceeForCausalLM(ArceeConfig(**small, hidden_act=name)) for name in ("relu2", "gelu_10")
        }
    assert (norms_of_hidden(gemma), norms_heads(gemma), has_layer_norms(gemma)) == (4, True, False)
    assert dense_mlp(gemma, 1).kept == 4 * 128
    assert (norms_of_hidden(phi), norms_heads(phi), has_layer_norms(phi)) == (1, True, True)
    assert [dense_mlp(model, 1).kept for model in arcee.values()] == [2 * 128, 4 * 128]
