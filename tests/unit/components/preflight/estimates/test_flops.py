"""FLOP counts equal those of torch's counter, and device peaks are right."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import components.preflight.estimates.flops
from components.losses import DPO, KTO
from components.preflight.estimates.flops import (
    data_sheet_peak,
    matmul_sizes,
    measure_peak,
    passes_without_gradient,
    peak_flops,
    peak_name,
    train_flops,
)
from runner.training.metrics import Window, performance

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "tied": {**BASE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "untied": {**BASE, "model_type": "llama"},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
    },
}


def build(architecture: dict[str, Any]) -> PreTrainedModel:
    fields = dict(architecture)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("architecture", FAMILIES.values(), ids=FAMILIES)
def test_equals_what_torch_counts(architecture: dict[str, Any]) -> None:
    model, length, rows = build(architecture), 24, 2
    ids = torch.randint(96, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # Eager attention computes all pairs, and causal attention needs half: hence twice the squared lengths.
    # (Rotary angles are a matmul too, of negligible size.)
    found = train_flops(
        matmul_sizes(model),
        num_tokens=rows * length,
        num_labels=rows * length,
        sum_squared_seqlens=2 * rows * length**2,
    )
    assert found == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_packing_costs_what_its_sequences_cost() -> None:
    sizes = matmul_sizes(build(FAMILIES["untied"]))
    settings = {"num_tokens": 64, "num_labels": 64}
    packed = train_flops(sizes, sum_squared_seqlens=4 * 16**2, **settings)
    whole = train_flops(sizes, sum_squared_seqlens=64**2, **settings)
    assert whole - packed == 3 * 3 * 32 * 2 * (64**2 - 4 * 16**2)  # passes, layers, width, flops


def test_passes_without_gradient_count_with_the_sizes_of_their_model() -> None:
    policy, reference = (matmul_sizes(build(FAMILIES[name])) for name in ("tied", "untied"))
    settings = {"num_tokens": 64, "num_labels": 32, "sum_squared_seqlens": 4 * 16**2}
    own, other = (train_flops(sizes, **settings) for sizes in (policy, reference))
    for loss, passes in ((DPO(), 0), (KTO(loss="apo_zero_unpaired"), 0), (KTO(), 1)):
        without = train_flops(policy, forward_only=passes_without_gradient(loss, policy, None), **settings)
        assert without == pytest.approx(own * (1 + passes / 3))
        both = passes_without_gradient(loss, policy, reference)
        found = train_flops(policy, forward_only=both, **settings)
        assert found == pytest.approx(without + (1 + passes) * other / 3)


def test_the_head_counts_where_there_are_labels() -> None:
    sizes = matmul_sizes(build(FAMILIES["tied"]))
    settings = {"num_tokens": 10, "sum_squared_seqlens": 100}
    difference = train_flops(sizes, num_labels=10, **settings) - train_flops(sizes, num_labels=4, **settings)
    assert difference == 6 * 6 * 96 * 32


def test_a_sliding_window_bounds_the_pairs() -> None:
    windowed = {**BASE, "model_type": "mistral", "sliding_window": 8}
    sizes = matmul_sizes(build(windowed))
    assert sizes.attention == ((32, 8),) * 3
    settings = {"num_tokens": 64, "num_labels": 0}
    assert (
        train_flops(sizes, sum_squared_seqlens=64**2, **settings)
        == 6 * sizes.linear * 64 + 12 * 3 * 32 * 8 * 64
    )
    short = train_flops(sizes, sum_squared_seqlens=8 * 8**2, **settings)
    assert short == 6 * sizes.linear * 64 + 12 * 3 * 32 * 8 * 8**2 / 2


def test_only_layers_that_slide_have_a_window() -> None:
    mixed = {**BASE, "model_type": "qwen3", "head_dim": 8, "sliding_window": 8, "use_sliding_window": True}
    assert matmul_sizes(build({**mixed, "max_window_layers": 2})).attention == ((32, float("inf")),) * 2 + (
        (32, 8),
    )


def test_mfu() -> None:
    """The peak is that of four devices with 1e12 FLOP/s each."""
    row = performance(Window(steps=1, tokens=8, flops=6e12, seconds=2.0), 4e12)
    assert row["perf/mfu"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("AMD Instinct MI300X", None, None),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name: str, bf16: float | None, fp32: float | None) -> None:
    assert data_sheet_peak(name, torch.bfloat16) == bf16
    assert data_sheet_peak(name, torch.float32) == fp32


def test_the_peak_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_name(torch.device("cuda"), torch.bfloat16) == "the data sheet's peak"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    assert peak_name(torch.device("cuda"), torch.bfloat16) == "the measured matmul peak"
    assert peak_name(torch.device("cpu"), torch.bfloat16) == "the measured matmul peak"


def test_the_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peak_flops.cache_clear()
    calls: list[tuple[torch.device, torch.dtype]] = []

    def measured(device: torch.device, dtype: torch.dtype) -> float:
        calls.append((device, dtype))
        return measure_peak(device, dtype)

    monkeypatch.setattr(components.preflight.estimates.flops, "measure_peak", measured)
    first = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < first < 1e14
    assert peak_flops(torch.device("cpu"), torch.float32) == first
    assert calls == [(torch.device("cpu"), torch.float32)]
    peak_flops.cache_clear()


def test_the_matrices_of_the_measurement_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(
        components.preflight.estimates.flops, "measure_peak", lambda *_: events.append("measured") or 1e12
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: events.append("freed"))
    assert peak_flops(torch.device("xpu"), torch.bfloat16) == 1e12
    assert events == ["measured", "freed"]
    peak_flops.cache_clear()


def test_a_peak_is_measured_however_busy_the_machine_is() -> None:
    assert measure_peak(torch.device("cpu"), torch.float32, seconds=0.0) > 0
