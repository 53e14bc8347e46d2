"""The initial factors of PiSSA are peft's, and what cannot be trained with them is refused."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from components.adapters import LoRA
from components.adapters.pissa import principal_factors
from components.contracts.errors import ConfigError
from components.models.initialize import seeded
from components.preflight.estimates import fsdp2_parameters as of_fsdp2
from components.preflight.estimates import megatron_parameters as of_megatron
from tests.distributed.cases import fsdp2, megatron, spec


@pytest.mark.parametrize(("niter", "rslora"), [(None, False), (4, True)])
def test_the_factors_are_those_of_peft(niter: int | None, rslora: bool) -> None:
    """The result is the same with another global random state, and for a matrix stored in bf16."""
    torch.manual_seed(0)
    layer, name = nn.Linear(24, 40, bias=False), "model.layers.0.mlp.up_proj"
    weight = layer.weight.detach().bfloat16()
    layer.weight.data = weight.float()
    words = "pissa" if niter is None else f"pissa_niter_{niter}"
    config = LoraConfig(r=4, lora_alpha=12, use_rslora=rslora, target_modules=["up"])
    model: Any = nn.ModuleDict({"up": layer})
    inject_adapter_in_model(config, model)
    with seeded(3, name):
        model["up"].pissa_init("default", words)
    scaling = LoRA(r=4, alpha=12.0, rslora=rslora).scaling
    a, b = principal_factors(weight, 4, scaling, niter, 3, name)
    torch.testing.assert_close(a, model["up"].lora_A["default"].weight.data, rtol=0, atol=0)
    torch.testing.assert_close(b, model["up"].lora_B["default"].weight.data, rtol=0, atol=0)
    rest = weight.float() - scaling * b @ a
    bound = torch.linalg.svdvals(weight.float())[4] * (1 + 1e-5 if niter is None else 1.1)
    assert torch.linalg.matrix_norm(rest, 2) <= bound


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"dora": True}, "init_lora_weights: pissa is not supported with adapter.dora; use kaiming"),
        ("qwen3", {"quantize": "nf4"}, "init_lora_weights: pissa is not supported with adapter.quantize"),
        ("qwen3", {"pissa_niter": -1}, "adapter.pissa_niter: is -1, but must be null, or at least 0"),
        (
            "qwen3",
            {"init_lora_weights": "kaiming", "pissa_niter": 4},
            "adapter.pissa_niter: is 4, .* with adapter.init_lora_weights=pissa",
        ),
        ("qwen3", {"r": 17}, "adapter.r: 17 is larger than half of the smaller side of .* at most 16"),
        ("qwen3_moe", {}, "adapter.init_lora_weights: is pissa, .* does not support for the experts"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    description = spec(family)
    with pytest.raises(ConfigError, match=message):
        LoRA(**{"r": 3, "init_lora_weights": "pissa"} | changes).check(
            description.build(description.config())
        )


def test_attention_of_a_model_with_experts_is_adapted() -> None:
    description = spec("qwen3_moe")
    adapter = LoRA(r=3, init_lora_weights="pissa", target_modules="attention")
    adapter.check(description.build(description.config()))


def test_an_ordinary_adapter_does_not_continue_it() -> None:
    description = spec("qwen3")
    model = description.build(description.config())
    hashes = {
        LoRA(r=3, init_lora_weights=kind).shape_hash(model) for kind in ("kaiming", "gaussian", "pissa")
    }
    assert len(hashes) == 2


@pytest.mark.parametrize("size", [2, 4])
def test_the_estimates_count_the_initial_factors_in_fp32(size: int) -> None:
    description = spec("qwen3")
    model = description.build(description.config())
    adapters = [LoRA(r=3, init_lora_weights=kind) for kind in ("kaiming", "pissa")]
    plain, with_initial = (
        (
            of_fsdp2.count_parameters(model, fsdp2(), 1, adapter).frozen_bytes(size),
            of_megatron.count_parameters(model, megatron(dp=1), "EttL", [0, 1], adapter).num_bytes(size),
        )
        for adapter in adapters
    )
    expected = 4 * sum(shape.numel() for shape in adapters[1].initial_shapes(model).values())
    assert [after - before for before, after in zip(plain, with_initial, strict=True)] == [expected] * 2
