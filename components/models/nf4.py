"""Frozen matrices in 4 bits: NF4 with scales of 8 bits (Dettmers et al., 2023, section 3).

A matrix becomes a vector of bytes, which ranks can cut anywhere: two values in each byte, then the fp32
numbers that describe the scales, then the scale of each block of 64 values as a byte. bitsandbytes converts
in both directions.
"""

import json
from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from components.atomic_write import write_atomic
from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError

BLOCK, GROUP = 64, 256
"""Number of values that share a scale, and number of scales that share a scale of their own."""

CONFIG = "quantization_config.json"
"""File in an adapter's folder with the quantisation of its base model, for transformers'
``BitsAndBytesConfig``."""
SETTINGS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def write_quantization_config(folder: Path, skipped: Sequence[str]) -> None:
    """Write the file for a base model whose linear layers are in 4 bits, except those named ``skipped``."""
    content = json.dumps({**SETTINGS, "llm_int8_skip_modules": skipped}, indent=2) + "\n"
    write_atomic(folder / CONFIG, content)


def has_config(folder: Path) -> bool:
    """Return whether the adapter in ``folder`` was trained on a base model in 4 bits."""
    return (folder / CONFIG).is_file()


def check_installed() -> None:
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "adapter.quantize: nf4 needs bitsandbytes, which is not installed; pip install bitsandbytes."
        )


def num_bytes(numel: int) -> int:
    """Return the number of bytes that ``quantize`` returns for ``numel`` values: 4.127 bits for each."""
    return sum(packed_sizes(numel))


def packed_sizes(numel: int) -> tuple[int, int, int]:
    """Return the sizes in bytes of the values, of the fp32 numbers for the scales, and of the scales."""
    blocks = -(-numel // BLOCK)
    return blocks * BLOCK // 2, 4 * (-(-blocks // GROUP) + 1), blocks


def quantize(matrix: Tensor) -> Tensor:
    """Return ``matrix`` quantised to bytes, which depend on its values but not on its dtype."""
    ops = operators()
    values, scales = ops.quantize_4bit(matrix.float().contiguous(), BLOCK, "nf4", torch.uint8)
    mean = scales.double().mean().float()  # in double, as the order of a sum depends on the number of threads
    codes, largest = ops.quantize_blockwise(scales - mean, code_of_scales(matrix.device), GROUP)
    values = F.pad(values.flatten(), (0, -values.numel() % (BLOCK // 2)))
    return torch.cat([values, torch.cat([largest, mean[None]]).view(torch.uint8), codes])


def dequantize(packed: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the matrix of ``shape`` that ``packed`` contains, in ``dtype``."""
    ops, numel = operators(), prod(shape)
    values, numbers, codes = packed.split(packed_sizes(numel))
    numbers = numbers.view(torch.float32)
    code = code_of_scales(packed.device)
    scales = ops.dequantize_blockwise(codes, numbers[:-1], code, GROUP, torch.float32) + numbers[-1]
    matrix: Tensor = ops.dequantize_4bit(values[: -(-numel // 2)], scales, BLOCK, "nf4", shape, dtype)
    return matrix


def rounded(matrix: Tensor) -> Tensor:
    """Return ``matrix`` quantised and dequantised, in its dtype."""
    return dequantize(quantize(matrix), matrix.shape, matrix.dtype)


@torch.no_grad()
def round_linears(model: PreTrainedModel) -> None:
    """Quantise and dequantise the matrices of ``model``'s linear layers, except that of its head."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.copy_(rounded(module.weight))


def quantized(weights: WeightSource, names: Collection[str], device: torch.device) -> WeightSource:
    """Return a source of ``weights`` that quantises those in ``names`` to bytes, on ``device``."""

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return quantize(weights(name).to(device))[index] if name in names else weights(name, index)

    return read


def operators() -> Any:
    """Return the operators of bitsandbytes, which have kernels for CPU and GPU."""
    import_module("bitsandbytes.functional")  # here, because it is optional and takes seconds
    return torch.ops.bitsandbytes


@cache
def code_of_scales(device: torch.device) -> Tensor:
    code: Tensor = import_module("bitsandbytes.functional").create_dynamic_map()
    return code.to(device)


class QuantizedLinearFunction(torch.autograd.Function):
    """The product with a frozen 4-bit matrix, which is dequantised anew in the forward and backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, inputs: Tensor, packed: Tensor, shape: torch.Size, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape  # type: ignore[attr-defined]
        return F.linear(inputs, dequantize(packed, shape, inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ dequantize(packed, ctx.shape, gradient.dtype), None, None, None


class NF4Linear(nn.Module):
    """A linear layer with a frozen 4-bit matrix, made on the meta device; ``weight`` holds the bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape = linear.weight.shape
        packed = torch.empty(num_bytes(linear.weight.numel()), dtype=torch.uint8, device="meta")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias

    # The kernels of bitsandbytes are not compiled, and its Python code breaks the graph in any case.
    @torch.compiler.disable
    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = QuantizedLinearFunction.apply(inputs, self.weight, self.shape, self.bias)
        return out
