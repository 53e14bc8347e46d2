"""Dropout of the inputs of adapters, the same in every layout.

Whether an element is dropped is a function of the token's sequence and position in this step (see
``token_hash.py``), the layer and the channel. Ranks that share a token therefore drop the same elements of
it, without exchanging anything, and a recomputation drops what the forward pass has dropped.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.engines.shared import generated_kernels
from components.engines.shared.token_hash import MASK, scramble

CHUNK = 1 << 24
"""Number of mask elements that exist at once, first as int32, where no kernel is generated."""


@dataclass
class TokenHashes:
    """The hashes of the tokens of the micro-batch whose forward or backward pass is running."""

    values: Tensor | None = None
    """``dropout_hashes`` of the tokens in the input of the adapted layers, in its order. None if the pass has
    no dropout."""


def dropout_hashes(hashes: Tensor) -> Tensor:
    """Return odd int32 numbers for ``hashes``, 32-bit integers in an int64 tensor."""
    return hashes.to(torch.int32) | 1


def channel_hashes(layer: str, channels: range, device: torch.device) -> Tensor:
    """Return an odd int32 number for each of ``channels`` of the input of ``layer``, a Hugging Face layer."""
    numbers = torch.arange(channels.start, channels.stop, device=device)
    return dropout_hashes(scramble(scramble(numbers) ^ (zlib.crc32(layer.encode()) & MASK)))


def drop(hidden: Tensor, hashes: TokenHashes, channels: Tensor, probability: float) -> Tensor:
    """Return ``hidden`` with elements set to 0 with ``probability``, and the others divided by 1 - it.

    Args:
        hidden: ``[..., H]``.
        hashes: those of its tokens.
        channels: ``channel_hashes`` of its channels, ``[H]``.
    """
    assert hashes.values is not None, "the engine gives the hashes before a training pass"
    tokens = hashes.values.reshape(*hidden.shape[:-1], 1)
    dropped: Tensor = Dropout.apply(hidden, tokens, channels, probability)
    return dropped


class Dropout(torch.autograd.Function):
    """The product with a mask, which is computed again in the backward pass instead of being saved."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, channels: Tensor, probability: float) -> Tensor:
        ctx.save_for_backward(tokens, channels)
        ctx.probability = probability
        return masked(hidden, tokens, channels, probability)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        tokens, channels = ctx.saved_tensors
        return masked(grads[0], tokens, channels, ctx.probability), None, None, None


def masked(values: Tensor, tokens: Tensor, channels: Tensor, probability: float) -> Tensor:
    """Return ``values [..., H]`` with dropout: each element is 0, or is divided by 1 - ``probability``.

    The int32 hashes ``tokens [..., 1]`` and ``channels [H]`` determine which elements are 0. On a GPU with
    Triton, this is one kernel that reads ``values`` and writes the result.
    """
    numbers = min(round(probability * 2**32), MASK) - 2**31, 1 / (1 - probability)
    if torch.compiler.is_compiling():
        return _masked(values, tokens, channels, *numbers)
    # torch.compile makes another kernel for inputs that require gradients or have more dimensions.
    width = values.shape[-1]
    flat, rows = values.detach().reshape(-1, width), tokens.reshape(-1, 1)
    if generated_kernels.is_available(values):
        product: Tensor = generated_kernels.compiled(_masked)(flat, rows, channels, *numbers)
        return product.view(values.shape)
    made = torch.empty_like(flat)
    parts = (tensor.split(max(CHUNK // width, 1)) for tensor in (made, flat, rows))
    for out, some, those in zip(*parts, strict=True):
        out.copy_(_masked(some, those, channels, *numbers))
    return made.view(values.shape)


def _masked(values: Tensor, tokens: Tensor, channels: Tensor, threshold: int, scale: float) -> Tensor:
    # The product of two odd random numbers, modulo 2 ** 32, is random too, and signed.
    return torch.where(tokens * channels >= threshold, values, 0).mul_(scale)
