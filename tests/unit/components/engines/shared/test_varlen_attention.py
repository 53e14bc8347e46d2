"""Packed, padded and single sequences give equal results; the oracle is eager attention of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.engines.shared.varlen_attention import (
    ATTENTION,
    SequenceSpans,
    attention,
    attention_kwargs,
    has_kernel,
    sequence_spans,
)

V = 97
LENGTHS = (7, 1, 20, 12)
COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Larger than usual, so that attention is far from uniform.
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    "qwen3_window": {
        "model_type": "qwen3",
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma3_text": {
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": 5, "pad_token_id": 0},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
}


def model(name: str, implementation: str) -> nn.Module:
    fields = {"model_type": name} | COMMON | MODELS[name]
    if name == "gpt2":
        fields = {k: v for k, v in fields.items() if k not in ("intermediate_size", "num_key_value_heads")}
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def sequences() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, V, (n,), generator=g) for n in LENGTHS]


def packed(rows: list[Tensor]) -> Batch:
    seqlens = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    return Batch(
        input_ids=torch.cat(rows)[None],
        labels=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(len(row)) for row in rows])[None],
        seqlens=seqlens,
        cu_seqlens=F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(seqlens.max()),
    )


def padded(rows: list[Tensor]) -> Batch:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Batch(
        input_ids=ids,
        labels=ids,
        position_ids=torch.arange(ids.shape[1]).expand_as(ids),
        seqlens=torch.tensor([len(row) for row in rows], dtype=torch.int32),
    )


def run(lm: nn.Module, batch: Batch) -> list[Tensor]:
    """Return the logits of every sequence, without padding."""
    logits = lm(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **attention_kwargs(batch, sequence_spans(batch)),
    ).logits
    rows = logits[0].split(batch.seqlens.tolist()) if batch.cu_seqlens is not None else logits
    return [row[:n] for row, n in zip(rows, batch.seqlens.tolist(), strict=True)]


def oracle(lm: nn.Module, rows: list[Tensor]) -> list[Tensor]:
    return [lm(input_ids=row[None], use_cache=False).logits[0] for row in rows]


@pytest.mark.parametrize("layout", [packed, padded])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_eager_attention_on_separate_sequences(
    name: str, layout: Callable[[list[Tensor]], Batch]
) -> None:
    ours, theirs, rows = model(name, ATTENTION), model(name, "eager"), sequences()
    got, expected = run(ours, layout(rows)), oracle(theirs, rows)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for logits in (got, expected):
        sum(row.square().sum() for row in logits).backward()
    for (parameter, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), parameter


@pytest.mark.parametrize("name", MODELS)
def test_contamination_is_seen(name: str) -> None:
    """A row that is taken as one sequence gives other logits, so the comparison above can fail."""
    lm, batch = model(name, ATTENTION), packed(sequences())
    right = torch.cat(run(lm, batch))
    end = batch.input_ids.shape[1]
    batch.cu_seqlens, batch.max_seqlen = torch.tensor([0, end], dtype=torch.int32), end
    assert (torch.cat(run(lm, batch)) - right).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_a_neighbour_changes_nothing(name: str) -> None:
    lm, rows = model(name, ATTENTION), sequences()
    before = run(lm, packed(rows))
    rows[0] = (rows[0] + 1) % V
    after = run(lm, packed(rows))
    assert not torch.equal(before[0], after[0])
    for a, b in zip(before[1:], after[1:], strict=True):
        assert torch.equal(a, b)


def test_an_empty_microbatch_runs() -> None:
    one = torch.zeros(1, 1, dtype=torch.int64)
    empty = torch.zeros(1, dtype=torch.int32)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    assert run(model("qwen3", ATTENTION), Batch(one, one - 100, one, empty))[0].shape == (0, V)
    packed_empty = Batch(one, one - 100, one, empty, cu_seqlens=ends, max_seqlen=1)
    lm = model("qwen3", ATTENTION)
    logits = lm(
        input_ids=one,
        position_ids=one,
        use_cache=False,
        **attention_kwargs(packed_empty, sequence_spans(packed_empty)),
    ).logits
    assert torch.isfinite(logits).all()


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("max_length_q", {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32)}),
    ("spans", {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4}),
    (
        "contradict",
        {"cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32), "max_length_q": 4, "padded": True},
    ),
    ("attention_mask", {"padded": True, "attention_mask": torch.ones(1, 4)}),
]


class Attention(nn.Module):
    is_causal = True


def call(
    module: nn.Module, batch_size: int = 1, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch_size, 2, 4, 8, generator=g) for _ in range(3))
    return attention(module, q, k, v, attention_mask, **options)[0]


@pytest.mark.parametrize(("message", "options"), CALLS)
def test_it_refuses_to_guess_boundaries(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=message):
        call(Attention(), **options)


def test_a_packed_batch_is_one_row() -> None:
    with pytest.raises(AssertionError, match="one row"):
        call(Attention(), 2, cu_seq_lens_q=torch.tensor([0, 4], dtype=torch.int32), max_length_q=4)


def test_a_model_without_boundaries_does_not_run() -> None:
    ids = torch.cat(sequences())[None]
    with pytest.raises(ConfigError, match="do not pass the ends of sequences on to Qwen3Attention"):
        model("qwen3", ATTENTION)(input_ids=ids, use_cache=False)
    with pytest.raises(AssertionError, match="attention_mask"):
        model("qwen3", ATTENTION)(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, padded=True
        )


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "something_new"])
def test_a_feature_that_is_not_computed_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"Attention needs {name}"):
        call(Attention(), padded=True, **{name: torch.ones(2)})
    call(Attention(), padded=True, **{name: None}, position_ids=torch.zeros(1, 4), use_cache=False)


def test_attention_that_is_not_causal_is_refused() -> None:
    encoder = Attention()
    encoder.is_causal = False
    with pytest.raises(ConfigError, match="later tokens"):
        call(encoder, padded=True)
    with pytest.raises(ConfigError, match="later tokens"):
        call(Attention(), padded=True, is_causal=False)


@pytest.mark.parametrize(
    "layout",
    [
        {"padded": True},
        {
            "cu_seq_lens_q": torch.tensor([0, 1, 4]),
            "max_length_q": 3,
            "spans": SequenceSpans([1, 3], [1, 3]),
        },
    ],
)
def test_dropout_is_honoured(layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, dropped = (call(Attention(), dropout=rate, **layout) for rate in (0.0, 0.5))
    assert not torch.allclose(plain, dropped)
    assert not torch.equal(dropped, call(Attention(), dropout=0.5, **layout))


@pytest.mark.parametrize(
    ("expected", "device", "dtype", "width", "dropout", "capability"),
    [
        (True, "cuda", torch.bfloat16, 128, 0.0, (8, 0)),
        (True, "cuda", torch.float16, 256, 0.0, (9, 0)),
        (False, "cpu", torch.bfloat16, 128, 0.0, (8, 0)),
        (False, "cuda", torch.float32, 128, 0.0, (8, 0)),
        (False, "cuda", torch.bfloat16, 128, 0.1, (8, 0)),
        (False, "cuda", torch.bfloat16, 264, 0.0, (8, 0)),
        (False, "cuda", torch.bfloat16, 84, 0.0, (8, 0)),
        (False, "cuda", torch.bfloat16, 128, 0.0, (7, 5)),
    ],
)
def test_the_cuda_kernel_is_used_only_if_it_supports_the_heads(
    monkeypatch: pytest.MonkeyPatch,
    expected: bool,
    device: str,
    dtype: torch.dtype,
    width: int,
    dropout: float,
    capability: tuple[int, int],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        query = torch.empty(1, 2, 4, width, dtype=dtype, device=device)
    assert has_kernel(query, dropout) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
def test_the_cuda_kernel_equals_one_sdpa_a_sequence(window: int | None) -> None:
    g = torch.Generator().manual_seed(0)
    total, ends = sum(LENGTHS), F.pad(torch.tensor(LENGTHS).cumsum(0, dtype=torch.int32), (1, 0))
    inputs = [torch.randn(1, heads, total, 64, generator=g) for heads in (4, 2, 2)]
    spans = SequenceSpans(list(LENGTHS), list(LENGTHS))
    options = {
        "cu_seq_lens_q": ends,
        "max_length_q": max(LENGTHS),
        "spans": spans,
        "sliding_window": window,
    }
    expected, _ = attention(Attention(), *inputs, None, **options)
    on_gpu = [tensor.cuda().bfloat16().requires_grad_() for tensor in inputs]
    got, _ = attention(Attention(), *on_gpu, None, **options | {"cu_seq_lens_q": ends.cuda()})
    torch.testing.assert_close(got.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    got.float().square().sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in on_gpu)
