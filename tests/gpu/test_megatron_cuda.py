"""Megatron on one GPU against FSDP2 on the same GPU. The tests are skipped without one."""

from pathlib import Path

import pytest
import torch

from components.engines.megatron.te_install import has_transformer_engine
from tests.e2e.commands import SMALL, rows, run_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAME = (*SMALL, "run.device=cuda", "run.export=false", "optimizer.lr=1e-5", "run.max_steps=6")


def curves(folder: Path, *overrides: str) -> list[tuple[float, float]]:
    run = run_here(folder, *SAME, *overrides)
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows(run, "train/loss")]


@pytest.mark.parametrize("stage", ["pt", "sft", "dpo"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_megatron_has_the_curve_of_fsdp2(tmp_path: Path, stage: str, dtype: str, bound: float) -> None:
    same = (f"stage={stage}", f"run.dtype={dtype}")
    ours = curves(tmp_path / "megatron", *same, "parallelism=megatron", "parallelism.transformer_impl=local")
    theirs = curves(tmp_path / "fsdp2", *same)
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=bound)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_an_adapter_has_the_curve_of_fsdp2(tmp_path: Path, dtype: str, bound: float) -> None:
    same = ("adapter=lora", "adapter.r=4", "stage=dpo", f"run.dtype={dtype}")
    ours = curves(tmp_path / "megatron", *same, "parallelism=megatron")
    theirs = curves(tmp_path / "fsdp2", *same)
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=bound)


@pytest.mark.parametrize("packing", ["bfd", "none"])
@pytest.mark.skipif(not has_transformer_engine(), reason="no transformer-engine")
def test_transformer_engine_has_the_curve_of_our_attention(tmp_path: Path, packing: str) -> None:
    same = ("run.dtype=bf16", f"data.packing={packing}", "parallelism=megatron")
    ours = curves(tmp_path / "te", *same, "parallelism.transformer_impl=transformer_engine")
    theirs = curves(tmp_path / "local", *same, "parallelism.transformer_impl=local")
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=3e-2)


@pytest.mark.skipif(not has_transformer_engine(), reason="no transformer-engine")
def test_float8_has_nearly_the_curve_of_bf16(tmp_path: Path) -> None:
    same = ("parallelism=megatron", "parallelism.transformer_impl=transformer_engine")
    ours, theirs = (curves(tmp_path / dtype, *same, f"run.dtype={dtype}") for dtype in ("fp8", "bf16"))
    assert ours != theirs
    for (loss, _), (expected, _) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(expected, rel=2e-2)


def test_gradients_that_products_add_are_those_that_are_added_later(tmp_path: Path) -> None:
    same = ("run.dtype=bf16", "parallelism=megatron", "parallelism.transformer_impl=local")
    ours, theirs = (
        curves(tmp_path / fused, *same, f"parallelism.gradient_accumulation_fusion={fused}")
        for fused in ("true", "false")
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-2)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_on_a_gpu(tmp_path: Path, recompute: str) -> None:
    ours = curves(
        tmp_path / "again", "parallelism=megatron", f"parallelism.activation_checkpointing={recompute}"
    )
    theirs = curves(tmp_path / "once", "parallelism=megatron")
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-4)
