"""Runs with run.dtype=fp16: skipped steps, checkpoints of the loss scale, exports, and the smallest scale."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.commands import SMALL, call_here, curve, newest, rows, run_here

HALF = (
    *SMALL,
    "run.dtype=fp16",
    "run.loss_scale.initial=1e8",
    "run.loss_scale.growth_interval=2",
    "run.max_steps=16",
    "run.final_sample_tokens=0",
    "run.eval_at_end=false",
    "run.global_batch_size=2",
    "data.max_length=32",
)
SAVED = 13
"""Step after a step without overflow, so that both numbers of the scale count in the next steps."""


def scales(run: Path) -> list[tuple[float, int]]:
    return [(row["train/loss_scale"], row["train/total_skipped"]) for row in rows(run, "train/loss")]


@pytest.mark.parametrize(("layout", "other"), [("single", "megatron"), ("megatron", "single")])
def test_a_run_adapts_its_scale_and_resumes(tmp_path: Path, layout: str, other: str) -> None:
    """Overflows end no run (at most two bad steps in a row are allowed), and a resumed run is the same."""
    given = (*HALF, "run.max_consecutive_skips=2", f"checkpoint.save_every={SAVED}", "checkpoint.keep_last=0")
    run = run_here(tmp_path / "whole", *given, "run.export=true", f"parallelism={layout}")
    whole = scales(run)
    assert whole[0] == (1e8, 1)
    skipped = whole[-1][1]
    assert skipped >= 4
    assert [scale for scale, _ in whole[: skipped // 2]] == [1e8 / 2**n for n in range(skipped // 2)]
    assert "step 1: gradients overflow; the update is skipped" in (run / "train.log").read_text()
    exported = AutoModelForCausalLM.from_pretrained(run / "export", dtype="auto")
    assert exported.dtype == torch.float16
    point = f"checkpoint.resume={run}/checkpoints/step_{SAVED:08d}"
    rest = run_here(tmp_path / "rest", *given, f"parallelism={layout}", point)
    assert curve(rest) == curve(run)[SAVED:]
    elsewhere = run_here(tmp_path / "elsewhere", *given, f"parallelism={other}", point)
    assert scales(elsewhere) == whole[SAVED:]
    for ours, theirs in zip(rows(elsewhere, "train/loss"), rows(run, "train/loss")[SAVED:], strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=2**-10)


def test_an_overflow_with_the_smallest_scale_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = ("run.loss_scale.initial=3", "stage._target_=tests.e2e.losses.Scaled", "+stage.factor=1e9")
    assert call_here(f"run.output_dir={tmp_path}", *HALF, *lost) == 1
    assert "gradients overflow in fp16 even with the loss scale 1.5" in " ".join(
        capsys.readouterr().err.split()
    )
    assert [row["train/loss_scale"] for row in rows(newest(tmp_path), "train/loss")] == [3]
