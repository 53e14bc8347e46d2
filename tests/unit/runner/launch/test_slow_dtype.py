"""The sentence about a dtype without instructions on this CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from components.preflight.estimates import flops
from runner.launch import checks
from runner.launch.checks import slow_dtype


def note(dtype: str, device: Any = "cpu") -> str:
    run: Any = SimpleNamespace(dtype=dtype)
    return " ".join(slow_dtype(run, device))


def test_a_slow_dtype_is_named_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "slowdown", {torch.float16: 28.3, torch.bfloat16: 0.4}.__getitem__)
    assert note("fp16") == (
        "run.dtype: a matrix product in fp16 takes 28 times as long as in fp32 on this CPU; "
        "run.dtype=fp32 is faster here"
    )
    assert [note("bf16"), note("fp32"), note("fp8"), note("fp16", "cuda")] == [""] * 4


def test_the_cost_is_the_ratio_of_the_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.float32: 6e9, torch.bfloat16: 3e9}
    monkeypatch.setattr(flops, "measure_peak", lambda _device, dtype, _seconds: peaks[dtype])
    assert flops.slowdown(torch.bfloat16) == 2.0
