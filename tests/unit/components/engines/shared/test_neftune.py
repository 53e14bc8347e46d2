"""Noise on embeddings: that of transformers' own hook, drawn in a way that depends on no layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.neftune import activate_neftune

from components.contracts.batch import Batch
from components.contracts.engine import EngineOptions
from components.engines.shared.neftune import NEFTune, noise
from components.optimizers import AdamW
from tests.distributed.cases import (
    Step,
    assert_same,
    fsdp2,
    next_token,
    packed,
    padded,
    plain_step,
    sequences,
    spec,
    step,
)
from tests.distributed.gradients import capture

ALPHA = 5.0
KEYS = (7, -(2**40) + 5, 2**62, 11, 0, 2**33, -1, 12)
MASK = 2**32 - 1


def scramble(x: int) -> int:
    """Hash 32 bits with lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def uniform(key: int, length: int, width: int) -> Tensor:
    """Return the numbers in (-1, 1) of one sequence, ``[length, width]``, in Python's integers."""
    key %= 2**64
    start = scramble(scramble(key & MASK) ^ key >> 32)
    tokens = [scramble(start ^ position) for position in range(length)]
    hashes = [[scramble(token ^ scramble(channel)) >> 8 for channel in range(width)] for token in tokens]
    return (2 * torch.tensor(hashes, dtype=torch.float64) + 1) / 2**24 - 1


def batches() -> list[Batch]:
    """Return four micro-batches of two sequences, with their keys."""
    rows = sequences()
    pairs = [packed(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    return [replace(b, sequence_keys=torch.tensor(KEYS[2 * i : 2 * i + 2])) for i, b in enumerate(pairs)]


def test_a_step_is_that_of_transformers_with_its_own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences one by one, because the range of the hook depends on the length of the padded rows.

    Evaluations, and log-probabilities without gradient, have no noise.
    """
    model = replace(spec("qwen3"), neftune_alpha=ALPHA)
    engine = fsdp2().build(model, AdamW(lr=1e-3, max_grad_norm=None), EngineOptions(torch.float32, "cpu"))
    loss, found = next_token(), capture(engine)
    got = step(engine, batches(), loss, lr=0.0)
    evaluated = engine.evaluate([batches()], loss)["loss"]
    logps = engine.logps(batches())
    engine.close()
    assert logps is not None
    assert -sum(float(part.sum()) for part in logps) == pytest.approx(
        evaluated * sum(len(batch.labelled()) for batch in batches()), rel=1e-5
    )

    def fill(tensor: Tensor, low: float, high: float) -> Tensor:
        assert low == -high
        _, length, width = tensor.shape
        return tensor.copy_(uniform(next(keys), length, width) * float(high))

    def watch(plain: Any) -> Callable[[], Tensor]:
        activate_neftune(plain.train(), ALPHA)
        monkeypatch.setattr(Tensor, "uniform_", fill)
        return lambda: torch.zeros(())

    assert evaluated == pytest.approx(plain_step("qwen3", "token").loss, rel=1e-5)
    keys = iter(KEYS)
    theirs = plain_step("qwen3", "token", watch)
    assert_same(Step(got.loss, got.grad_norm, dict(found)), theirs)
    assert abs(got.loss / evaluated - 1) > 1e-3


def test_packed_is_padded_and_padding_has_no_noise() -> None:
    rows, of = sequences(), NEFTune(ALPHA, 0)
    flat, lines = (replace(make(rows), sequence_keys=torch.tensor(KEYS)) for make in (packed, padded))
    (keys, spread), (their_keys, their_spread) = of.noise_of(flat), of.noise_of(lines)
    inside = their_spread > 0
    assert inside.sum() == keys.numel() < their_keys.numel()
    assert torch.equal(keys[0], their_keys[inside])
    assert torch.equal(spread[0], their_spread[inside])
    assert not torch.equal(NEFTune(ALPHA, 1).noise_of(flat)[0], keys)


def test_noise_is_uniform_and_of_no_pattern() -> None:
    found = noise(torch.arange(2000), torch.full((2000,), 8.0), torch.empty(1, 64))
    assert found.abs().max() < 1
    assert abs(found.mean()) < 5e-3
    assert found.var() == pytest.approx(1 / 3, rel=1e-2)
    for matrix in (found[:64], found.T):
        assert torch.corrcoef(matrix).fill_diagonal_(0).abs().max() < 5 / matrix.shape[1] ** 0.5
