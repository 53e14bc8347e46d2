"""Attention over long sequences is split by queries on the CPU; the oracle is an explicit float64 softmax."""

import math

import pytest
import torch
from torch import Tensor

from components.engines.shared.sdpa import CPU_ROWS, CPU_WHOLE, packed_sdpa

OPTIONS = {"scale": None, "dropout": 0.0}


def tensors(spans: list[int]) -> list[Tensor]:
    """Return q with four heads, and k and v with two heads, each ``[1, heads, T, 8]``."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, sum(spans), 8).requires_grad_() for heads in (4, 2, 2)]


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    q, k, v = (t.double().repeat_interleave(4 // t.shape[1], dim=1) for t in (q, k, v))
    places = torch.arange(q.shape[2])
    behind = places[:, None] - places
    seen = (behind >= 0) & (behind < (window or math.inf))
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 50])
def test_results_and_gradients_of_long_sequences(window: int | None) -> None:
    spans = [300, 1, CPU_ROWS[4], CPU_ROWS[4] + 1, CPU_WHOLE[4]]
    inputs = tensors(spans)
    pieces = zip(*(t.split(spans, dim=2) for t in inputs), strict=True)
    expected = torch.cat([written_out(*piece, window) for piece in pieces], dim=1)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    found = packed_sdpa(*inputs, spans, window=window, **OPTIONS)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad((found * weights.float()).sum(), inputs)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50, 500])
def test_queries_after_a_prefix(window: int | None) -> None:
    spans, key_spans = [300, 7, CPU_ROWS[4]], [1000, 7, 2 * CPU_ROWS[4]]
    query, key, value = tensors(key_spans)
    last = [q[:, :, -n:] for q, n in zip(query.split(key_spans, dim=2), spans, strict=True)]
    pieces = zip(*(t.split(key_spans, dim=2) for t in (query, key, value)), spans, strict=True)
    expected = torch.cat([written_out(*piece, window)[:, -n:] for *piece, n in pieces], dim=1)
    found = packed_sdpa(torch.cat(last, dim=2), key, value, spans, key_spans, window=window, **OPTIONS)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 200, 5000])
def test_saved_memory_is_proportional_to_the_length(window: int | None) -> None:
    def saved_bytes(length: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = packed_sdpa(*tensors([length]), [length], window=window, **OPTIONS)
        assert result.grad_fn is not None  # until here, autograd holds what it has saved
        return sum(storage.nbytes() for storage in storages.values())

    assert saved_bytes(4096) < 2.05 * saved_bytes(2048)


def test_which_sequences_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 all from 129 to 767 tokens are; longer ones only if they need a mask or have no kernel."""
    rows = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Tensor, *others: Tensor, **options: object) -> Tensor:
        rows.append(query.shape[2])
        return kernel(query, *others, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", counted)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            packed_sdpa(*(t.to(dtype) for t in tensors([300, 100])), [300, 100], window=None, **OPTIONS)
    assert rows == [128, 128, 44, 100, 300, 100]
    rows.clear()
    with torch.no_grad():
        for window, dropout in ((None, 0.0), (768, 0.0), (767, 0.0), (None, 0.1)):
            packed_sdpa(*tensors([768]), [768], window=window, scale=None, dropout=dropout)
        query, key, value = tensors([769])
        packed_sdpa(query, key, value[..., :4], [769], window=None, **OPTIONS)
        packed_sdpa(query[:, :, 1:], key, value, [768], [769], window=None, **OPTIONS)
    assert rows == [768, 768, *6 * [128], *6 * [128], *6 * [128], 1, *6 * [128]]
