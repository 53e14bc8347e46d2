"""Matrices in 4 bits, against bitsandbytes' own functions of whole matrices."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file
from torch import nn
from torch.torch_version import TorchVersion

from components.adapters import LoRA, export_adapter
from components.contracts.errors import ConfigError
from components.engines.fsdp2 import lora
from components.models import nf4
from tests.distributed.cases import spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (5, 26), (200, 334)], ids=str)
def test_values_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Also if the last block of values, or the last group of scales, is not full."""
    torch.manual_seed(0)
    matrix = (torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    packed, state = quantize_4bit(matrix, compress_statistics=True, quant_type="nf4")
    ours = nf4.quantize(matrix)
    assert (ours.dtype, ours.shape) == (torch.uint8, (nf4.num_bytes(matrix.numel()),))
    found = nf4.dequantize(ours, matrix.shape, dtype)
    torch.testing.assert_close(found, dequantize_4bit(packed, state), rtol=1e-6, atol=1e-6)
    assert torch.equal(nf4.quantize(matrix.float()), ours)
    assert not torch.allclose(found, matrix, atol=1e-2)


def test_a_value_takes_little_more_than_4_bits() -> None:
    assert 8 * nf4.num_bytes(4096 * 4096) / 4096**2 == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, rel=1e-6)


def test_gradients_go_through_the_values_in_4_bits() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40)
    layer = nf4.NF4Linear(linear)
    layer.weight = nn.Parameter(nf4.quantize(linear.weight.data), requires_grad=False)
    linear.weight.data = nf4.rounded(linear.weight.data)
    inputs = torch.randn(2, 3, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(linear(inputs).square().sum(), inputs)
    (found,) = torch.autograd.grad(layer(inputs).square().sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_all_linear_layers_except_the_head_and_saved_modules_are_in_4_bits() -> None:
    model = spec("llama").meta_model
    adapter = LoRA(
        quantize="nf4", target_modules=("q_proj",), modules_to_save=("layers.0.mlp.up_proj", "lm_head")
    )
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    others = linears - {"lm_head", "model.layers.0.mlp.up_proj"}
    assert adapter.quantized_weights(model) == {f"{name}.weight" for name in others}
    assert LoRA().quantized_weights(model) == set()


def test_without_bitsandbytes_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"adapter.quantize: .*; pip install bitsandbytes"):
        LoRA(quantize="nf4").check(spec("llama").meta_model)


def test_a_base_with_random_weights_is_exported_as_it_was_quantised(tmp_path: Path) -> None:
    """In fp32 also if the run is in bf16, which would give other values in 4 bits."""
    model = spec("llama")
    kinds: list[tuple[Literal["nf4"] | None, torch.dtype]] = [("nf4", torch.float32), (None, torch.bfloat16)]
    for quantize, stored in kinds:
        folder = tmp_path / str(quantize)
        export_adapter(LoRA(quantize=quantize), model, [], folder)
        LoRA(quantize=quantize).finish_export(model, folder, folder / "base", 0, torch.bfloat16)
        assert {t.dtype for t in load_file(folder / "base" / "model.safetensors").values()} == {stored}
        assert nf4.has_config(folder) == (quantize is not None)


def test_a_torch_that_cannot_shard_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    LoRA(quantize="nf4").check(spec("llama").meta_model)  # merging does not shard it
    with pytest.raises(ConfigError, match=r"adapter.quantize: .* torch 2.12 or newer, and this is 2.11.0"):
        lora.check(LoRA(quantize="nf4"), 1)
