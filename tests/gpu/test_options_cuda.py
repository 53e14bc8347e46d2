"""Options of both engines on a GPU: the curve of the CPU, and resumes that repeat a run.

The tests are skipped without a GPU.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.records.run_record import RunRecord
from tests.e2e.commands import SMALL, curve, rows, run_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EXPERTS = ("model=moe_tiny", "data.max_length=128", "run.max_steps=4")
LATENT = ("model=deepseek_tiny", *EXPERTS[1:])
WINDOWS = (
    "+model.architecture.sliding_window=24",
    "+model.architecture.use_sliding_window=true",
    "+model.architecture.max_window_layers=1",
)
FSDP2 = ("parallelism=fsdp2", "parallelism.dp=1")
MEGATRON = ("parallelism=megatron", "parallelism.transformer_impl=local")
SHARDED = (*MEGATRON, "parallelism.distributed_optimizer=true")
QLORA = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or torch.__version__ < "2.12", reason="no bitsandbytes, or an old torch"
)

DROPOUT = ("adapter=lora", "adapter.dropout=0.1")
OPTIONS = {
    "padded": (*SMALL, *FSDP2, "data.packing=none"),
    "windows": (*SMALL, *WINDOWS),
    "kto": (*SMALL, *FSDP2, "stage=kto"),
    "rewards": (*SMALL, *FSDP2, "stage=rm"),
    "tr-dpo": (*SMALL, *FSDP2, "stage=dpo", "stage.sync_reference_every=1", "stage.wpo=true"),
    "shared prompt": (*SMALL, *FSDP2, "stage=dpo", "data.share_prompt=true"),
    "host state": (*SMALL, *FSDP2, "parallelism.cpu_offload=true"),
    "host activations": (*SMALL, *FSDP2, "parallelism.activation_offloading=true"),
    "recomputed": (*SMALL, *FSDP2, "parallelism.activation_checkpointing=full"),
    "muon": (*SMALL, *FSDP2, "optimizer=muon"),
    "lora": (*SMALL, *FSDP2, "adapter=lora", "stage=dpo"),
    "dropout": (*SMALL, *FSDP2, *DROPOUT),
    "dropout recomputed": (*SMALL, *FSDP2, *DROPOUT, "parallelism.activation_checkpointing=full"),
    "dropout and host activations": (*SMALL, *FSDP2, *DROPOUT, "parallelism.activation_offloading=true"),
    "dora": (*SMALL, *FSDP2, "adapter=dora"),
    "pissa": (*SMALL, *FSDP2, "adapter=lora", "adapter.init_lora_weights=pissa"),
    "qlora": (*SMALL, *FSDP2, "adapter=qlora"),
    "experts": (*EXPERTS, *FSDP2),
    "experts lora": (*EXPERTS, *FSDP2, "adapter=lora"),
    "latent attention": (*LATENT, *FSDP2),
    "megatron padded": (*SMALL, *MEGATRON, "data.packing=none", "stage=kto"),
    "megatron sharded": (*SMALL, *SHARDED),
    "megatron host state": (*SMALL, *SHARDED, "parallelism.optimizer_cpu_offload=true"),  # not in fp32
    "megatron host activations": (*SMALL, *MEGATRON, "parallelism.activation_offloading=true"),
    "megatron muon": (*SMALL, *MEGATRON, "optimizer=muon"),
    "megatron dropout": (*SMALL, *MEGATRON, *DROPOUT),
    "megatron experts": (*EXPERTS, *MEGATRON),
    "megatron experts in turn": (*EXPERTS, *MEGATRON, "parallelism.moe_grouped_gemm=false"),
    "megatron latent attention": (*LATENT, *MEGATRON),
}


def options(name: str) -> Any:
    return pytest.param(OPTIONS[name], id=name, marks=[QLORA] if "qlora" in name else [])


@pytest.mark.parametrize(("dtype", "of_loss", "of_norm"), [("fp32", 1e-4, 2e-3), ("bf16", 1e-2, 5e-2)])
@pytest.mark.parametrize("chosen", map(options, OPTIONS))
def test_the_curve_of_the_cpu(
    tmp_path: Path, chosen: tuple[str, ...], dtype: str, of_loss: float, of_norm: float
) -> None:
    if dtype == "fp32" and "parallelism.optimizer_cpu_offload=true" in chosen:
        pytest.skip("Megatron moves only the fp32 copies of bf16 or fp16 weights")
    same = (*chosen, f"run.dtype={dtype}", "run.export=false", "optimizer.lr=1e-5")
    on_gpu = rows(run_here(tmp_path / "gpu", *same, "run.device=cuda"), "train/loss")
    on_cpu = rows(run_here(tmp_path / "cpu", *on_plain_fsdp2(same)), "train/loss")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=of_loss)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=of_norm)


def on_plain_fsdp2(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the same run on a CPU with FSDP2. Megatron would not run there while a GPU is visible."""
    return (*(word for word in words if not word.startswith("parallelism")), *FSDP2, "run.device=cpu")


@pytest.mark.parametrize("layout", [FSDP2, MEGATRON], ids=["fsdp2", "megatron"])
def test_fp16_has_the_curve_of_the_cpu(tmp_path: Path, layout: tuple[str, ...]) -> None:
    same = (*SMALL, *layout, "run.dtype=fp16", "run.loss_scale.initial=256", "run.export=false")
    on_gpu = rows(run_here(tmp_path / "gpu", *same, "run.device=cuda"), "train/loss")
    on_cpu = rows(run_here(tmp_path / "cpu", *on_plain_fsdp2(same)), "train/loss")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=2e-3)


RESUMED = (
    "host state",
    "lora",
    "experts",
    "muon",
    "megatron sharded",
    "megatron host state",
    "megatron experts",
)


@pytest.mark.parametrize("chosen", map(options, RESUMED))
def test_a_resumed_run_repeats_every_bit(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    same = (*chosen, "run.device=cuda", "run.dtype=bf16", "run.deterministic=true", "run.export=false")
    straight = run_here(tmp_path / "a", *same, "checkpoint.save_every=2", "checkpoint.keep_last=0")
    half = straight / "checkpoints" / "step_00000002"
    rest = run_here(tmp_path / "b", *same, f"checkpoint.resume={half}")
    assert curve(rest) == curve(straight)[2:]


def test_the_largest_micro_batch_that_fits_is_found(tmp_path: Path) -> None:
    run = run_here(tmp_path, *SMALL, "run.device=cuda", "run.micro_batch_size=auto", "run.export=false")
    assert rows(run, "train/loss")
    assert RunRecord.read(run).peak_memory.trial_step, "the trial step was measured"
