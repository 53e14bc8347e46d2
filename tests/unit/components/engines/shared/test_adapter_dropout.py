"""Dropout that is a function of position, layer and channel: its numbers, and what does not change them."""

import zlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.engines.shared import generated_kernels
from components.engines.shared.adapter_dropout import (
    TokenHashes,
    channel_hashes,
    drop,
    dropout_hashes,
    masked,
)
from components.engines.shared.token_hash import token_hashes
from tests.distributed.cases import packed, padded, sequences
from tests.unit.components.engines.shared.test_neftune import MASK, scramble

LAYER = "model.layers.0.self_attn.q_proj"
CPU = torch.device("cpu")


def kept(batch: Batch, probability: float, *, layer: str = LAYER, width: int = 96, seed: int = 0) -> Tensor:
    """Return which elements of ``[B, T, width]`` stay."""
    hashes = TokenHashes(dropout_hashes(token_hashes(batch, seed)))
    ones = torch.ones(*batch.labels.shape, width)
    return drop(ones, hashes, channel_hashes(layer, range(width), CPU), probability) != 0


def long_batch(length: int = 4096) -> Batch:
    ids = torch.zeros(1, length, dtype=torch.int64)
    lengths = torch.tensor([length], dtype=torch.int32)
    positions = torch.arange(length)[None]
    return Batch(ids, ids, positions, lengths, sequence_keys=torch.tensor([2**40 + 5]))


def test_an_element_stays_by_the_product_of_two_hashes() -> None:
    """The same rule in Python's integers."""
    batch, layer = packed(sequences()[:2]), zlib.crc32(LAYER.encode())
    assert batch.sequence_keys is not None
    expected = []
    for key, length in zip(batch.sequence_keys.tolist(), batch.seqlens.tolist(), strict=True):
        start = scramble(scramble((key + 3) & MASK) ^ (key + 3) >> 32)
        for position in range(length):
            token = scramble(start ^ position) | 1
            hashes = [token * (scramble(scramble(channel) ^ layer) | 1) & MASK for channel in range(8)]
            signed = [number - 2**32 if number >= 2**31 else number for number in hashes]
            expected.append([number >= 0.25 * 2**32 - 2**31 for number in signed])
    assert kept(batch, 0.25, width=8, seed=3)[0].tolist() == expected


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.9])
def test_as_many_elements_are_dropped_as_asked_for(probability: float) -> None:
    """In all elements, in every token and in every channel, to five standard deviations."""
    dropped = ~kept(long_batch(), probability, width=512)[0]
    for numbers in (dropped.flatten()[None], dropped, dropped.T):
        deviation = (probability * (1 - probability) / numbers.shape[1]) ** 0.5
        shares = numbers.double().mean(1)
        assert (shares - probability).abs().max() < 5 * deviation


def test_elements_are_dropped_independently() -> None:
    """Neighbouring tokens, channels and layers, and the corners of rectangles, have no correlation."""
    first = (~kept(long_batch(), 0.5, width=512))[0].double() - 0.5
    other = (~kept(long_batch(), 0.5, width=512, layer="model.layers.1.self_attn.q_proj"))[0].double() - 0.5
    corners = first[:-1, :-1] * first[1:, 1:] * first[:-1, 1:] * first[1:, :-1] * 4
    pairs = (first[1:] * first[:-1], first[:, 1:] * first[:, :-1], first * other, corners)
    for products in pairs:
        assert (4 * products).mean().abs() < 5 / products.numel() ** 0.5


def test_the_mean_stays_and_gradients_pass_where_elements_do() -> None:
    batch = long_batch()
    hashes = TokenHashes(dropout_hashes(token_hashes(batch, 0)))
    channels = channel_hashes(LAYER, range(256), CPU)
    hidden = torch.ones(1, 4096, 256, dtype=torch.bfloat16, requires_grad=True)
    out = drop(hidden, hashes, channels, 0.2)
    assert out.dtype == torch.bfloat16
    assert out.detach().float().mean() == pytest.approx(1, abs=2e-3)
    out.sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_generated_kernel_gives_the_same(dtype: torch.dtype) -> None:
    tokens = dropout_hashes(token_hashes(long_batch(), 0)).reshape(1, -1, 1)
    values = torch.randn(1, 4096, 96).to(dtype)
    whole = masked(values, tokens, channel_hashes(LAYER, range(96), CPU), 0.3)
    turned = values.transpose(0, 1), tokens.transpose(0, 1)
    with mock.patch.object(generated_kernels, "is_available", return_value=True):
        generated = masked(*turned, channel_hashes(LAYER, range(96), CPU), 0.3)
    assert torch.equal(generated.transpose(0, 1), whole)


def test_a_probability_next_to_one_drops_everything() -> None:
    assert kept(long_batch(), 1 - 1e-12).sum() < 3


def test_a_token_keeps_its_elements_in_any_batch_and_layout() -> None:
    rows = sequences()
    flat, lines = kept(packed(rows), 0.3)[0], kept(padded(rows), 0.3)
    assert torch.equal(flat, torch.cat([line[: len(row.ids)] for line, row in zip(lines, rows, strict=True)]))
    alone = kept(packed(rows[2:3]), 0.3)[0]
    start = sum(len(row.ids) for row in rows[:2])
    assert torch.equal(flat[start : start + len(alone)], alone)
    parts = [channel_hashes(LAYER, channels, CPU) for channels in (range(40), range(40, 96))]
    assert torch.equal(torch.cat(parts), channel_hashes(LAYER, range(96), CPU))


def test_a_step_a_seed_and_a_layer_have_their_own() -> None:
    batch = packed(sequences())
    assert batch.sequence_keys is not None
    first = kept(batch, 0.3)
    others = (
        kept(replace(batch, sequence_keys=batch.sequence_keys ^ 0x9E3779B97F4A7C15), 0.3),
        kept(batch, 0.3, seed=1),
        kept(batch, 0.3, layer="model.layers.0.self_attn.k_proj"),
    )
    for other in others:
        assert (first == other).double().mean() == pytest.approx(0.3**2 + 0.7**2, abs=0.05)
