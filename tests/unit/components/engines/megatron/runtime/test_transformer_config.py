"""Options for which the host would wait are off, and further fields are checked and handed over."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_mscale
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import get_capacity
from transformers import AutoConfig, AutoModelForCausalLM

from components.contracts.device import DeviceKind
from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.engines.megatron.runtime import transformer_config as module
from components.engines.megatron.runtime.transformer_config import transformer_config
from tests.distributed.cases import megatron, spec


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
def test_windows_are_those_of_transformers(family: str) -> None:
    """Some families read no ``sliding_window`` or no ``layer_types``, whatever config.json has."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    kinds = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    experts = {"num_local_experts": 2, "num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
    given = {
        **sizes,
        **heads,
        **kinds,
        "sliding_window": 3,
        **(experts if family in ("mixtral", "qwen3_moe") else {}),
    }
    config = AutoConfig.for_model(family, **given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.arange(8)[None], output_attentions=True).attentions
    seen = [int((layer[0, 0, -1] > 0).sum()) for layer in weights]  # by the last of eight tokens
    assert [window or 8 for window in module.windows(config)] == seen


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_scores_of_latent_attention_are_scaled_as_in_transformers(rope_type: str) -> None:
    hf = spec("latent_yarn").config()
    hf.rope_parameters["rope_type"] = rope_type  # the keys of yarn stay
    expected = AutoModelForCausalLM.from_config(hf).model.layers[0].self_attn.scaling
    given = module.mla_arguments(hf)
    scale = _yarn_get_mscale(given["rotary_scaling_factor"], given["mscale_all_dim"]) ** 2
    assert scale / hf.qk_head_dim**0.5 == pytest.approx(expected)


@pytest.mark.parametrize("asked", [True, False])
def test_tokens_are_permuted_by_transformer_engine_on_request(
    monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Its functions, which Megatron imports, are replaced, because it is not installed."""
    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs")
    for name in (*names, "unpermute"):
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    layout, options = megatron(moe_permute_fusion=asked), EngineOptions(torch.bfloat16, "cuda")
    assert transformer_config(spec("qwen3_moe").config(), layout, options).moe_permute_fusion is asked


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2)])
def test_stages_do_not_wait_for_the_whole_gpu(pp: int, vpp: int) -> None:
    options = EngineOptions(torch.float32, "cpu")
    config = transformer_config(spec("qwen2_four").config(), megatron(pp=pp, vpp=vpp), options)
    assert not (config.batch_p2p_comm and config.batch_p2p_sync)


@pytest.mark.parametrize(
    ("device", "asked", "fused"),
    [("cuda", None, True), ("cpu", None, False), ("cuda", False, False), ("cpu", True, True)],
)
def test_the_activation_is_fused_on_a_gpu(device: DeviceKind, asked: bool | None, fused: bool) -> None:
    layout = megatron(bias_activation_fusion=asked)
    config = transformer_config(spec("llama").config(), layout, EngineOptions(torch.float32, device))
    assert config.bias_activation_fusion is fused


@pytest.mark.parametrize(
    ("device", "uses_te", "asked", "fused"),
    [
        ("cuda", False, None, True),
        ("cuda", True, None, False),
        ("cpu", False, None, False),
        ("cuda", False, False, False),
        ("cuda", True, True, True),
    ],
)
def test_gradients_are_added_by_their_products_on_a_gpu(
    device: DeviceKind, uses_te: bool, asked: bool | None, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "uses_transformer_engine", lambda *_: uses_te)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    layout = megatron(gradient_accumulation_fusion=asked)
    config = transformer_config(spec("llama").config(), layout, EngineOptions(torch.bfloat16, device))
    assert config.gradient_accumulation_fusion is fused
    layout = megatron(activation_offloading=True)
    config = transformer_config(spec("llama").config(), layout, EngineOptions(torch.bfloat16, device))
    assert not config.gradient_accumulation_fusion


@pytest.mark.parametrize("uses_te", [True, False])
def test_the_rotary_embedding_is_fused_with_transformer_engine(
    uses_te: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own reads the boundaries of sequences, which that engine has on the device."""
    monkeypatch.setattr(module, "uses_transformer_engine", lambda *_: uses_te)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", object())
    options = EngineOptions(torch.bfloat16, "cpu")
    config = transformer_config(spec("llama").config(), megatron(), options)
    assert config.apply_rope_fusion is config.transformer_engine is uses_te


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_model_parallel_size": 2}, r"tensor_model_parallel_size: .*; use parallelism\.tp\.$"),
        ({"moe_token_dispatcher_type": "flex"}, r"; use parallelism\.moe_token_dispatcher\.$"),
        ({"recompute_method": "block"}, r"; use parallelism\.activation_checkpointing\.$"),
        ({"moe_grouped_gemm": True}, r"; use parallelism\.moe_grouped_gemm\.$"),
        ({"recompute_num_layers": 2}, r"; use parallelism\.recompute_num_layers\.$"),
        ({"recompute_modules": ["mlp"]}, r"; use parallelism\.recompute_modules\.$"),
        ({"hidden_size": 128}, "hidden_size: may not be set here; the model or this engine gives"),
        ({"glu_linear_ofset": 0.5}, "glu_linear_ofset: is not a field .*; did you mean 'glu_linear_offset'"),
        ({"glu_linear_offset": "much"}, "glu_linear_offset: got 'much'; Input should be a valid number"),
        ({"timers": "all"}, "timers: got 'all'; Input should be callable"),
        ({"glu_linear_offset": [1, "x"]}, "glu_linear_offset: got"),
        (
            {"flash_decode": True, "no_rope_freq": 1},
            r"^parallelism\.transformer_config: Megatron refuses",
        ),
        ({"cpu_offloading": True}, r"; use parallelism\.activation_offloading\.$"),
        ({"attention_softmax_in_fp32": False}, "this engine replaces; leave it out"),
        ({"cuda_graph_impl": "local"}, "captures no CUDA graphs"),
        ({"external_cuda_graph": True}, "captures no CUDA graphs"),
        ({"fp4": "e2m1"}, "run.dtype has no fp4"),
        ({"fp8_margin": 1}, "only delayed scaling reads it"),
        ({"first_last_layers_bf16": True}, "only with run.dtype=fp8"),
        ({"moe_router_dtype": "fp32"}, "it belongs to Megatron's own router"),
        ({"overlap_moe_expert_parallel_comm": True}, "no schedule plan"),
        ({"tp_comm_overlap": True}, "does not create the buffers"),
        ({"use_te_rng_tracker": True}, "only Megatron's training script"),
        ({"variable_seq_lengths": True}, "know the lengths"),
        ({"perform_initialization": False}, "the gradient norm lacks"),
        ({"mtp_loss_scaling_factor": 0.3}, r"; use model\.mtp\.loss_coef\.$"),
        ({"cross_entropy_loss_fusion": True}, "the probabilities of labels itself"),
        ({"cross_entropy_fusion_impl": "te"}, "the probabilities of labels itself"),
        ({"rotary_base": 5e5}, "embedding is that of the model"),
        ({"original_max_position_embeddings": 64}, "embedding is that of the model"),
        ({"beta_fast": 16.0}, "embedding is that of the model"),
        ({"mscale": 0.7}, "embedding is that of the model"),
    ],
)
def test_a_field_that_may_not_be_set_is_refused(given: dict[str, Any], message: str) -> None:
    options, layout = EngineOptions(torch.float32, "cpu"), megatron(pp=2, transformer_config=given)
    family = "deepseek" if given.keys() & MLATransformerConfig.__annotations__ else "llama"
    with pytest.raises(ConfigError, match=message) as refused:
        transformer_config(spec(family).config(), layout, options)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("first", "expected"), [(None, ("uniform", 1)), (3, ("block", 3))])
def test_all_layers_or_the_first_ones_are_recomputed(first: int | None, expected: tuple[str, int]) -> None:
    layout = megatron(activation_checkpointing="full", recompute_num_layers=first)
    config = transformer_config(spec("llama").config(), layout, EngineOptions(torch.float32, "cpu"))
    assert (config.recompute_method, config.recompute_num_layers) == expected


@pytest.mark.parametrize(("number", "top_k"), [(60, 4), (160, 6), (4, 2)])
def test_an_expert_with_room_for_all_tokens_has_no_more_room(number: int, top_k: int) -> None:
    hf = spec("qwen3_moe").config()
    hf.num_local_experts, hf.num_experts_per_tok = number, top_k
    layout = megatron(capacity_factor=number / top_k, moe_pad_to_capacity=True)
    config = transformer_config(hf, layout, EngineOptions(torch.float32, "cpu"))
    for tokens in range(1, 200):
        assert get_capacity(tokens * top_k, number, config.moe_expert_capacity_factor) == tokens


def test_further_fields_reach_megatron() -> None:
    further = {"glu_linear_offset": 0.5, "clone_scatter_output_in_embedding": False}
    layout = megatron(transformer_config=further)
    config = transformer_config(spec("llama").config(), layout, EngineOptions(torch.float32, "cpu"))
    assert (config.glu_linear_offset, config.clone_scatter_output_in_embedding) == (0.5, False)


def test_fields_of_fp8_are_for_runs_in_fp8() -> None:
    layout = megatron(transformer_config={"first_last_layers_bf16": True})
    options = EngineOptions(torch.bfloat16, "cpu", float8=True)
    assert transformer_config(spec("llama").config(), layout, options).first_last_layers_bf16


def test_every_refused_beginning_is_that_of_a_field() -> None:
    """A later Megatron may rename a field."""
    names = [each.name for each in fields(MLATransformerConfig)]
    beginnings = (*module.REFUSED, *module.READ_IN_FLOAT8, *module.OURS)
    assert [word for word in beginnings if not any(name.startswith(word) for name in names)] == []
