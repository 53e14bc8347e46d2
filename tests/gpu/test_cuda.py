"""Whole runs on a GPU. They are skipped without one."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from components.engines.shared.adapter_dropout import dropout_hashes, masked
from tests.e2e.commands import EXPORTING, SMALL, curve, rows, run_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ENGINES = {
    "parallelism=single": "components.engines.fsdp2.engine:FSDP2Engine",
    "parallelism=megatron": "components.engines.megatron.runtime.engine:MegatronEngine",
}


@pytest.mark.parametrize("stage", ["pt", "sft", "dpo"])
def test_fp32_gives_the_curve_of_the_cpu(tmp_path: Path, stage: str) -> None:
    same = (*SMALL, f"stage={stage}", "run.export=false", "optimizer.lr=1e-5")
    on_cpu = rows(run_here(tmp_path / "cpu", *same), "train/loss")
    on_gpu = rows(run_here(tmp_path / "gpu", *same, "run.device=cuda"), "train/loss")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)


def test_kto_reads_a_reference_from_the_host(tmp_path: Path) -> None:
    same = (*SMALL, "stage=kto", f"data.cache_dir={tmp_path}/cache", "run.device=cuda", "run.export=false")
    frozen, cached = (
        rows(run_here(tmp_path / reference, *same, f"stage.reference={reference}"), "train/loss")
        for reference in ("frozen", "precomputed")
    )
    for ours, theirs in zip(cached, frozen, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5)


@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_bf16_trains_and_resumes(tmp_path: Path, packing: str) -> None:
    same = (*EXPORTING, "run.device=cuda", "run.dtype=bf16", f"data.packing={packing}", "run.max_steps=6")
    straight = run_here(tmp_path / "a", *same, "checkpoint.save_every=3", "checkpoint.keep_last=0")
    assert (straight / "export" / "model.safetensors").is_file()
    half = straight / "checkpoints" / "step_00000003"
    rest = run_here(tmp_path / "b", *same, f"checkpoint.resume={half}")
    for ours, theirs in zip(curve(rest), curve(straight)[3:], strict=True):
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=1e-3), key


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("layout", ENGINES)
def test_the_host_never_waits_inside_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, stage: str
) -> None:
    run = (*SMALL, layout, "run.device=cuda", "run.dtype=bf16", f"stage={stage}", "run.export=false")
    run_here(tmp_path / "first", *run)  # compiles the kernels of the head, for which the host waits
    engine = resolve_name(ENGINES[layout])
    plain = engine.train_microbatches

    def watched(*args: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            plain(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine, "train_microbatches", watched)
    assert rows(run_here(tmp_path / "watched", *run), "train/loss")


@pytest.mark.parametrize("option", ["run.compile=true", "run.kernels=liger"])
@pytest.mark.parametrize(("dtype", "of_loss", "of_norm"), [("fp32", 1e-4, 1e-3), ("bf16", 1e-2, 5e-2)])
def test_fused_blocks_give_the_same_curve(
    tmp_path: Path, option: str, dtype: str, of_loss: float, of_norm: float
) -> None:
    if "liger" in option:
        pytest.importorskip("liger_kernel")
    same = (*SMALL, "run.device=cuda", "run.export=false", f"run.dtype={dtype}", "optimizer.lr=1e-5")
    plain = rows(run_here(tmp_path / "a", *same, "run.kernels=torch"), "train/loss")
    for ours, theirs in zip(rows(run_here(tmp_path / "b", *same, option), "train/loss"), plain, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=of_loss)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=of_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dropout_of_adapters_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    values = torch.randn(4096, 1536).to(dtype)
    tokens, channels = (
        dropout_hashes(torch.randint(2**32, (number,))) for number in (len(values), values.shape[1])
    )
    on_cpu = masked(values, tokens[:, None], channels, 0.1)
    on_gpu = masked(values.cuda(), tokens[:, None].cuda(), channels.cuda(), 0.1)
    assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="no products in float8"
)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_float8_gives_the_curve_of_its_emulation(tmp_path: Path, recipe: str) -> None:
    """Packed rows have any number of tokens, most of them no multiple of 16."""
    same = (*SMALL, "run.dtype=fp8", f"parallelism.fp8_recipe={recipe}", "run.export=false")
    on_cpu = rows(run_here(tmp_path / "cpu", *same, "optimizer.lr=1e-5"), "train/loss")
    for compiled in (False, True):
        options = ("run.device=cuda", "optimizer.lr=1e-5", f"run.compile={compiled}")
        on_gpu = rows(run_here(tmp_path / f"gpu {compiled}", *same, *options), "train/loss")
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=2e-3)
            assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=5e-2)
