"""The errors of the Megatron engine's checks; Megatron itself refuses the same splits of layers."""

import itertools
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from components.adapters import LoRA
from components.contracts.device import DeviceKind
from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.megatron import Megatron
from components.engines.megatron.checks import uses_transformer_engine
from components.engines.megatron.pipeline_split import check_stages, parse_layout
from components.models import ModelSpec
from components.optimizers import SGD, AdamW, Optimizer

SHAPE = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}

LATENT = {"model_type": "deepseek_v3", "num_key_value_heads": 12, "first_k_dense_replace": 4}
"""Latent attention without experts."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


def check(
    shape: dict[str, Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    dtype: torch.dtype = torch.float32,
    device: DeviceKind = "cpu",
    adapter: LoRA | None = None,
    freeze: tuple[str, ...] = (),
    ranks: int = 1,
    **sizes: Any,
) -> None:
    """Run the checks of the parent process for ``parallelism=megatron`` with ``sizes``."""
    spec = ModelSpec(architecture=SHAPE | (shape or {}), freeze=freeze)
    model = spec.build(spec.config())
    options = EngineOptions(dtype, device, adapter=adapter)
    Megatron(**sizes).check(model, optimizer or AdamW(), options, world_size=ranks)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed and that there is a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("components.engines.megatron.checks.has_transformer_engine", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))


# ---- keys against each other

CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tp": 0}, ["parallelism.tp", "at least 1"]),
    ({"dp": -1}, ["parallelism.dp", "at least 1"]),
    ({"bucket_size": 0}, ["parallelism.bucket_size", "at least 1"]),
    ({"vpp": 2}, ["parallelism.vpp", "parallelism.pp"]),
    ({"pipeline_layout": "EtL"}, ["parallelism.pipeline_layout", "parallelism.pp"]),
    ({"first_stage_layers": 1}, ["parallelism.first_stage_layers", "parallelism.pp"]),
    ({"last_stage_layers": 1}, ["parallelism.last_stage_layers", "parallelism.pp"]),
    (
        {"pp": 2, "last_stage_layers": 1, "pipeline_layout": "Ett|tL"},
        ["parallelism.pipeline_layout", "last_stage_layers"],
    ),
    ({"sequence_parallel": True, "pp": 2}, ["parallelism.sequence_parallel", "parallelism.tp"]),
    ({"cp_comm_type": "a2a"}, ["parallelism.cp_comm_type", "parallelism.cp"]),
    (
        {"bucket_size": 1000, "overlap_grad_reduce": False},
        ["parallelism.bucket_size", "parallelism.overlap_grad_reduce"],
    ),
    ({"ep": 0}, ["parallelism.ep", "at least 1"]),
    ({"capacity_factor": 0.0}, ["parallelism.capacity_factor", "above 0"]),
    (
        {"moe_token_drop_policy": "position"},
        ["parallelism.moe_token_drop_policy", "parallelism.capacity_factor"],
    ),
    ({"moe_pad_to_capacity": True}, ["parallelism.moe_pad_to_capacity", "parallelism.capacity_factor"]),
    (
        {"shared_expert_overlap": True, "moe_token_dispatcher": "allgather"},
        ["parallelism.shared_expert_overlap", "moe_token_dispatcher=alltoall"],
    ),
    (
        {"shared_expert_overlap": True, "activation_offloading": True},
        ["parallelism.activation_offloading", "parallelism.shared_expert_overlap=false"],
    ),
    (
        {"overlap_param_gather": True},
        ["parallelism.overlap_param_gather", "parallelism.distributed_optimizer"],
    ),
    (
        {"overlap_param_gather": True, "distributed_optimizer": True, "overlap_grad_reduce": False},
        ["parallelism.overlap_param_gather", "parallelism.overlap_grad_reduce"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), CONTRADICTIONS, ids=str)
def test_contradictions_are_refused_on_sight(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Megatron(**changes)
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_belongs_together_is_accepted() -> None:
    Megatron(pp=2, vpp=2)
    Megatron(tp=2, sequence_parallel=True)
    Megatron(cp=2, cp_comm_type="a2a")
    Megatron(overlap_param_gather=True, distributed_optimizer=True, bucket_size=1000)


@pytest.mark.parametrize(
    ("sizes", "started", "takes"),
    [
        ({"tp": 2}, 3, "a multiple of 2 ranks"),
        ({"tp": 4}, 2, "a multiple of 4"),
        ({"pp": 2, "dp": 2}, 6, "4 ranks"),
    ],
)
def test_ranks_that_a_launcher_cannot_have_meant(sizes: dict[str, Any], started: int, takes: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"parallelism\.dp: this layout takes {takes}.*WORLD_SIZE={started}"
    ):
        Megatron(**sizes).world_size({"WORLD_SIZE": str(started)}, 0)


# ---- the layout against the run

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "key-value heads": ({"tp": 3}, ["parallelism.tp: 3", "num_key_value_heads = 4", "use 2 or 4."]),
    "heads": (
        {"tp": 2, "shape": {"num_attention_heads": 3, "num_key_value_heads": 3}},
        ["parallelism.tp: 2", "_heads = 3", "use 1 or 3."],
    ),
    "columns of the MLP": (
        {"tp": 4, "shape": {"intermediate_size": 90}},
        ["parallelism.tp: 4", "intermediate_size = 90", "use 1 or 2."],
    ),
    "rows of the vocabulary": (
        {"tp": 4, "shape": {"vocab_size": 6}},
        ["parallelism.tp: 4", "vocab_size = 6", "use 1 or 2."],
    ),
    "heads over cp": (
        {"tp": 2, "cp": 4, "cp_comm_type": "a2a"},
        ["parallelism.cp: 4", "6 attention heads", "parallelism.cp=2 or 3", "all_gather"],
    ),
    "layers": ({"pp": 3}, ["parallelism.pp: 3", "num_hidden_layers = 4", "use 2 or 4", "first_stage_layers"]),
    "chunks": ({"pp": 2, "vpp": 4}, ["parallelism.vpp: 4", "2 layers", "2 stages", "use 1 or 2."]),
    "first stage": (
        {"pp": 3, "first_stage_layers": 1},
        ["parallelism.first_stage_layers", "leaves 3 of 4 layers to 2 other", "a positive multiple of 2"],
    ),
    "all layers in the ends": (
        {"pp": 3, "first_stage_layers": 2, "last_stage_layers": 2},
        ["parallelism.first_stage_layers", "leaves 0 of 4 layers to 1 other"],
    ),
    "too few layers in the ends": (
        {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 1},
        ["leaves 1 of 4 layers to 0 other", "leave none"],
    ),
    "chunks of the last stage": (
        {"pp": 2, "vpp": 2, "last_stage_layers": 1},
        ["parallelism.last_stage_layers: 1", "vpp = 2", "a multiple of 2"],
    ),
    "parts": (
        {"pp": 2, "pipeline_layout": "Et|tt|tL"},
        ["parallelism.pipeline_layout", "3 parts", "pp x vpp = 2 x 1"],
    ),
    "letters": ({"pp": 2, "pipeline_layout": "Ett|mtL"}, ["parallelism.pipeline_layout", "'m'"]),
    "no embedding": ({"pp": 2, "pipeline_layout": "tt|ttL"}, ["parallelism.pipeline_layout", "begin with E"]),
    "two losses": ({"pp": 2, "pipeline_layout": "EttL|ttL"}, ["parallelism.pipeline_layout", "once"]),
    "layers of a layout": (
        {"pp": 2, "pipeline_layout": "Et*2|tL"},
        ["parallelism.pipeline_layout", "has 3 layers", "give 4"],
    ),
    "sharded SGD": (
        {"distributed_optimizer": True, "optimizer": SGD()},
        ["parallelism.distributed_optimizer", "optimizer=adamw"],
    ),
    "nesterov": ({"optimizer": SGD(nesterov=True)}, ["optimizer.nesterov", "parallelism=fsdp2"]),
    "offload on the CPU": (
        {"optimizer_cpu_offload": True, "distributed_optimizer": True},
        ["parallelism.optimizer_cpu_offload", "on the CPU"],
    ),
    "offload without sharding": (
        {"optimizer_cpu_offload": True, "device": "cuda"},
        ["parallelism.optimizer_cpu_offload", "parallelism.distributed_optimizer=true"],
    ),
    "offload in fp32": (
        {"optimizer_cpu_offload": True, "distributed_optimizer": True, "device": "cuda"},
        ["parallelism.optimizer_cpu_offload", "run.dtype=bf16"],
    ),
    "transformer-engine on the CPU": (
        {"transformer_impl": "transformer_engine"},
        ["parallelism.transformer_impl", "on the CPU", "use auto or local"],
    ),
    "architecture": ({"shape": {"model_type": "olmo2"}}, ["olmo2", "llama, mistral", "parallelism=fsdp2"]),
    "activation": ({"shape": {"hidden_act": "gelu"}}, ["hidden_act=gelu", "silu", "parallelism=fsdp2"]),
    "bias of the MLP": ({"shape": {"mlp_bias": True}}, ["mlp_bias=True", "parallelism=fsdp2"]),
    "bias of attention": ({"shape": {"attention_bias": True}}, ["attention_bias=True", "parallelism=fsdp2"]),
    "rope": (
        {
            "shape": {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                }
            }
        },
        ["rope_type=yarn", "llama3"],
    ),
    "bias of latents": (
        {"shape": LATENT | {"attention_bias": True}},
        ["attention_bias=True of deepseek_v3", "parallelism=fsdp2"],
    ),
    "heads of latents over tp": ({"tp": 8, "shape": LATENT}, ["parallelism.tp: 8", "= 12", "use 4 or 6."]),
    "heads of latents over cp": (
        {"tp": 2, "cp": 4, "cp_comm_type": "a2a", "shape": LATENT},
        ["parallelism.cp: 4", "6 attention heads", "all_gather"],
    ),
    "rope of latents": (
        {"shape": LATENT | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
        ["rope_type=dynamic of deepseek_v3", "yarn"],
    ),
    "partial rope": (
        {
            "shape": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            }
        },
        ["partial_rotary_factor=0.5"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    arguments, words = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        check(**arguments)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert len(message) < 260


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"optimizer": SGD()},
        {"tp": 4, "pp": 4, "sequence_parallel": True},
        {"pp": 2, "vpp": 2, "distributed_optimizer": True, "dtype": torch.bfloat16},
        {"pp": 3, "first_stage_layers": 2},
        {"pp": 3, "pipeline_layout": "E|t*4|L"},
        {"tp": 2, "cp": 3, "cp_comm_type": "a2a"},
        {"cp": 5},
        {"tp": 4, "shape": {"vocab_size": 7}},
        {
            "optimizer_cpu_offload": True,
            "distributed_optimizer": True,
            "device": "cuda",
            "dtype": torch.bfloat16,
        },
        {"shape": {"model_type": "mistral", "sliding_window": 16}},
        {"shape": {"model_type": "qwen2"}},
        {"shape": {"model_type": "qwen3", "head_dim": 8}},
        {"tp": 2, "sequence_parallel": True, "cp": 5, "shape": LATENT | {"rope_parameters": YARN}},
    ],
    ids=str,
)
def test_what_fits_is_accepted(arguments: dict[str, Any]) -> None:
    check(**arguments)


def test_a_gpu_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check(device="cuda")
    with pytest.raises(ConfigError, match=r"run\.device: is cpu.*CUDA_VISIBLE_DEVICES="):
        check(device="cpu")


def test_other_accelerators_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.device: is xpu.*parallelism=fsdp2"):
        check(device="xpu")


class OwnLlama(LlamaForCausalLM):
    """A model class of the user, whose forward pass may differ."""


def test_another_model_of_the_same_type_is_refused() -> None:
    spec = ModelSpec(architecture=SHAPE)
    with torch.device("meta"):
        own = OwnLlama(spec.config())
    with pytest.raises(ConfigError, match="OwnLlama"):
        Megatron().check(own, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)


def test_a_parameter_without_a_place_is_refused_by_name() -> None:
    spec = ModelSpec(architecture=SHAPE)
    model = spec.build(spec.config())
    model.model.layers[1].mlp.scale = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.scale"):
        Megatron().check(model, AdamW(), EngineOptions(torch.float32, "cpu"), world_size=1)


# ---- transformer-engine

TE_RUN: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "run.dtype=bf16"),
        ({"cp": 2}, "cp_comm_type=all_gather"),
        ({"shape": {"model_type": "mistral", "sliding_window": 16}}, "sliding window"),
        ({"shape": LATENT}, "the latent attention of deepseek_v3 is computed by local only"),
        ({"adapter": LoRA(r=2, alpha=2.0, target_modules="all-linear")}, "where an adapter needs its output"),
        ({"activation_offloading": True}, "activations are offloaded"),
    ],
    ids=str,
)
def test_auto_is_transformer_engine_where_it_can_be(arguments: dict[str, Any], reason: str | None) -> None:
    def uses(kind: str) -> bool:
        config = ModelSpec(architecture=SHAPE | arguments.get("shape", {})).config()
        dtype = arguments.get("dtype", torch.bfloat16)
        offloads = arguments.get("activation_offloading", False)
        chosen = Megatron(transformer_impl=kind, cp=arguments.get("cp", 1), activation_offloading=offloads)
        return uses_transformer_engine(config, chosen, dtype, "cuda", arguments.get("adapter"))

    assert uses("auto") == (reason is None)
    assert not uses("local")
    check(**TE_RUN | arguments)
    if reason is None:
        check(**TE_RUN | arguments, transformer_impl="transformer_engine")
    else:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            check(**TE_RUN | arguments, transformer_impl="transformer_engine")


@pytest.mark.usefixtures("transformer_engine")
@pytest.mark.parametrize(
    ("capability", "flash_attn", "auto"),
    [((8, 0), False, False), ((8, 9), False, False), ((8, 0), True, True), ((9, 0), False, True)],
)
def test_auto_needs_a_fast_kernel_for_packed_rows(
    capability: tuple[int, int], flash_attn: bool, auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = object() if flash_attn else None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("components.engines.megatron.te_install.find_spec", lambda _: installed)
    config, kinds = ModelSpec(architecture=SHAPE).config(), ("auto", "transformer_engine")
    run = (torch.bfloat16, "cuda")
    uses = [uses_transformer_engine(config, Megatron(transformer_impl=kind), *run) for kind in kinds]
    assert uses == [auto, True]


# ---- adapters and frozen parts


def test_what_an_adapter_cannot_have() -> None:
    settings: dict[str, Any] = {"r": 2, "alpha": 2.0, "target_modules": "all-linear"}
    check(adapter=LoRA(**settings))
    with pytest.raises(ConfigError, match=r"adapter\.dora: .*parallelism=fsdp2"):
        check(adapter=LoRA(**settings, dora=True))
    with pytest.raises(ConfigError, match=r"adapter\.modules_to_save: .*parallelism=fsdp2"):
        check(adapter=LoRA(**settings, modules_to_save=("norm",)))
    check(adapter=LoRA(**settings), gradient_accumulation_fusion=False)
    with pytest.raises(ConfigError, match=r"parallelism\.gradient_accumulation_fusion: .*adapter=none"):
        check(adapter=LoRA(**settings), gradient_accumulation_fusion=True)


@pytest.mark.parametrize(
    ("pattern", "frozen", "left"),
    [
        ("*.q_proj.*", "q_proj.weight", "k_proj.weight"),
        ("*.v_proj.*", "v_proj.weight", "q_proj.weight"),
        ("model.layers.3.mlp.gate_proj.weight", "layers.3.mlp.gate_proj", "layers.3.mlp.up_proj"),
        ("*.[qk]_proj.bias", "q_proj.bias", "v_proj.bias"),
        # Megatron would compute no gradient for these biases, without an error.
        ("*.[qkv]_proj.weight", "q_proj.weight", "q_proj.bias"),
    ],
)
def test_a_part_of_a_tensor_is_not_frozen_alone(pattern: str, frozen: str, left: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check({"model_type": "qwen2"}, freeze=(pattern,))
    words = str(refused.value)
    assert words.startswith("model.freeze, model.train_only: ")
    assert re.search(rf"{re.escape(frozen)}\S* is frozen and \S*{re.escape(left)}\S* is not", words), words


@pytest.mark.parametrize(
    "pattern", ["*.[qkv]_proj.*", "*.[qkv]_proj.bias", "*.gate_proj.*", "*norm*", "lm_head.*"]
)
def test_whole_tensors_may_be_frozen(pattern: str) -> None:
    patterns = (pattern, "*.up_proj.*") if "gate" in pattern else (pattern,)
    check({"model_type": "qwen2", "tie_word_embeddings": False}, freeze=patterns)


def test_transformer_engine_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("components.engines.megatron.checks.has_transformer_engine", lambda: False)
    check(**TE_RUN)
    with pytest.raises(ConfigError, match="not installed"):
        check(**TE_RUN, transformer_impl="transformer_engine")


# ---- comparison with Megatron itself

SPLITS = list(itertools.product(range(1, 9), (2, 3, 4), (1, 2, 3), (None, 1, 2, 3, 4), (None, 1, 2, 3, 4)))
PIECES = ["E", "|", "t", "L", "tt", "Et*2", "(t|)*2", "(tt|t)*2", "t,t*2", "t*", "(t", "2", "|t*2|"]
STRINGS = ["".join(pieces) for pieces in itertools.product(PIECES, repeat=3)]
STRINGS += ["Et|tt|tL", "E,t*3|,t*3,L", "E|(t|)*4|L", "Et|L", "Ett|L|t", "E||ttt|L", "EtttL", "Et(t|)*2L"]


def accepts(chosen: Megatron, layers: int) -> bool:
    try:
        check_stages(chosen, layers)
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Return a function that gives Megatron's number of layers of every chunk, or None if Megatron raises."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    import components.engines.megatron.runtime  # noqa: F401  it must come before megatron

    def verdict(layers: int, pp: int, vpp: int, **options: Any) -> list[int] | None:
        try:
            config = TransformerConfig(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                pipeline_dtype=torch.float32,
                **options,
            )
            if split := config.pipeline_model_parallel_layout:
                assert len(split.layout[0]) == vpp
                return [chunk.count(split.flatten_layout[0]) for stage in split.layout for chunk in stage]
            chunks = itertools.product(range(vpp) if vpp > 1 else [None], range(pp))
            return [get_num_layers_to_build(config, stage, rank) for stage, rank in chunks]
        except (AssertionError, ValueError, IndexError):
            return None

    return verdict


def test_every_split_is_judged_as_megatron_does(megatron: Any) -> None:
    accepted = 0
    for layers, pp, vpp, first, last in SPLITS:
        chosen = Megatron(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        uneven = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        held = megatron(layers, pp, vpp, **uneven)
        # If one layer is split over two stages with two in the last, Megatron computes -1 and 2.
        fits = held is not None and min(held) > 0
        assert accepts(chosen, layers) == fits, (layers, pp, vpp, first, last)
        accepted += fits
    assert 100 < accepted < len(SPLITS) - 100


def test_every_layout_string_is_judged_as_megatron_does(megatron: Any) -> None:
    accepted = 0
    for text, pp, vpp, layers in itertools.product(STRINGS, (2, 3), (1, 2), (2, 3, 4)):
        ours = accepts(Megatron(pp=pp, vpp=vpp, pipeline_layout=text), layers)
        theirs = megatron(layers, pp, vpp, pipeline_model_parallel_layout=text)
        assert ours == (theirs is not None), (text, pp, vpp, layers)
        accepted += ours
    assert accepted >= 10


def test_layout_strings_are_read_as_megatron_does(megatron: Any) -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    read = 0
    for text in STRINGS:
        try:
            theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        except AssertionError:
            with pytest.raises(ConfigError):
                parse_layout(text)
            continue
        assert parse_layout(text) == ["".join(letters[layer.name] for layer in part) for part in theirs], text
        read += 1
    assert 100 < read < len(STRINGS)


# ---- experts

SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
QWEN_MOE: dict[str, Any] = {"shape": {"model_type": "qwen3_moe", **SPARSE}}
SHARED: dict[str, Any] = {
    "shape": {"model_type": "deepseek_v3", "num_key_value_heads": 12, "first_k_dense_replace": 1}
    | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 1}
    | {"moe_intermediate_size": 24, "n_shared_experts": 1},
}
DENSE: dict[str, Any] = {"shape": {"model_type": "qwen3"}}
LORA = LoRA(r=2, alpha=2.0, target_modules="mlp")
EXPERTS: list[tuple[dict[str, Any], list[str]]] = [
    (DENSE | {"ep": 2, "ranks": 2}, ["parallelism.ep", "qwen3 has no experts"]),
    (DENSE | {"moe_token_dispatcher": "allgather"}, ["parallelism.moe_token_dispatcher", "no experts"]),
    (DENSE | {"moe_grouped_gemm": True}, ["parallelism.moe_grouped_gemm", "no experts"]),
    (DENSE | {"moe_permute_fusion": True, "device": "cuda"}, ["parallelism.moe_permute_fusion", "GPU and"]),
    (QWEN_MOE | {"moe_permute_fusion": True}, ["parallelism.moe_permute_fusion", "transformer-engine 2.1"]),
    (
        QWEN_MOE | {"moe_permute_fusion": True, "capacity_factor": 1.5, "moe_pad_to_capacity": True},
        ["parallelism.moe_permute_fusion", "parallelism.moe_pad_to_capacity=false"],
    ),
    (DENSE | {"capacity_factor": 1.5}, ["parallelism.capacity_factor", "no experts"]),
    (QWEN_MOE | {"ep": 4, "ranks": 4}, ["parallelism.ep: 4", "use 1 or 2"]),
    (QWEN_MOE | {"etp": 5, "ranks": 5}, ["parallelism.etp: 5", "24; use 1"]),
    (QWEN_MOE | {"ep": 2, "etp": 2, "ranks": 2}, ["parallelism.ep", "the 2 ranks", "parallelism.ep=1"]),
    (QWEN_MOE | {"tp": 2, "ranks": 2}, ["parallelism.sequence_parallel", "sequence_parallel=true"]),
    (QWEN_MOE | {"shared_expert_overlap": True}, ["parallelism.shared_expert_overlap", "no shared"]),
    (
        QWEN_MOE | {"capacity_factor": 3.5, "moe_pad_to_capacity": True},
        ["parallelism.capacity_factor", "at most 3,"],
    ),
    (
        {"shape": {**QWEN_MOE["shape"], "num_experts": 8, "num_experts_per_tok": 3}}
        | {"capacity_factor": 2.6667, "moe_pad_to_capacity": True},
        ["parallelism.capacity_factor", "at most 2.66,"],
    ),
    (
        QWEN_MOE | {"adapter": LORA, "etp": 2, "ranks": 2},
        ["parallelism.etp: 2", "adapter.target_modules=attention"],
    ),
    (
        QWEN_MOE | {"adapter": LORA, "moe_grouped_gemm": True},
        ["parallelism.moe_grouped_gemm: is true", "leave it out, or use adapter.target_modules=attention"],
    ),
    (
        QWEN_MOE | {"freeze": ("*.experts.0.*",)},
        [
            "experts.0.gate_proj.weight is frozen and",
            "experts.1.gate_proj.weight is not",
            "or set parallelism.moe_grouped_gemm=false",
        ],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), EXPERTS, ids=[str(words[0]) for _, words in EXPERTS])
def test_what_experts_do_not_fit_is_refused(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        check(**arguments)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    "arguments",
    [
        QWEN_MOE | {"ep": 2, "etp": 2, "tp": 2, "sequence_parallel": True, "ranks": 4},
        QWEN_MOE | {"ep": 3, "ranks": 6, "pp": 2, "capacity_factor": 3.0, "moe_pad_to_capacity": True},
        QWEN_MOE
        | {"ep": 2, "ranks": 2, "moe_token_dispatcher": "allgather", "moe_token_drop_policy": "position"}
        | {"capacity_factor": 1.25},
        QWEN_MOE | {"adapter": LORA},
        QWEN_MOE | {"freeze": ("*.experts.0.*",), "moe_grouped_gemm": False},
        QWEN_MOE | {"freeze": ("*.experts.*_proj.*",)},
        QWEN_MOE | {"adapter": replace(LORA, target_modules="attention"), "etp": 2, "ranks": 2},
        SHARED | {"ep": 4, "ranks": 4, "shared_expert_overlap": True},
    ],
    ids=str,
)
def test_what_experts_fit_is_accepted(arguments: dict[str, Any]) -> None:
    check(**arguments)


@pytest.mark.usefixtures("transformer_engine")
def test_tokens_are_permuted_by_transformer_engine_where_there_are_experts() -> None:
    check(**TE_RUN | QWEN_MOE, moe_permute_fusion=True)
    with pytest.raises(ConfigError, match=r"moe_permute_fusion: is True, but .* has no experts"):
        check(**TE_RUN, moe_permute_fusion=True)


@pytest.mark.usefixtures("transformer_engine")
def test_experts_are_computed_without_transformer_engine() -> None:
    check(**TE_RUN | QWEN_MOE)
    with pytest.raises(ConfigError, match="experts of qwen3_moe are computed by local only"):
        check(**TE_RUN | QWEN_MOE, transformer_impl="transformer_engine")


class JoinedError(Exception):
    """Raised in place of joining a process group."""


@pytest.mark.parametrize(
    ("expected", "tp", "device", "started"),
    [("1", 2, "cuda", False), (None, 1, "cuda", False), (None, 2, "cpu", False), (None, 2, "cuda", True)],
)
def test_tensor_parallelism_has_one_queue_to_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    expected: str | None,
    tp: int,
    device: DeviceKind,
    started: bool,
) -> None:
    """The variable is set before the process group is joined, which starts CUDA."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: started)

    def join(*_: object) -> None:
        raise JoinedError

    monkeypatch.setattr("components.engines.shared.process_group.joined", join)
    spec = ModelSpec(architecture=SHAPE)
    with pytest.raises(JoinedError):
        Megatron(tp=tp).build(spec, AdamW(), EngineOptions(torch.float32, device))
    assert os.environ.get(name) == expected
