"""Whole runs with ``run.dtype=fp8`` on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.any_to_any_cases import read
from tests.e2e.commands import EXPORTING, rows, run_here

FEW_ROWS = ("run.global_batch_size=4", "run.micro_batch_size=4", "run.export=false")


def test_files_are_those_of_bf16(tmp_path: Path) -> None:
    run = run_here(tmp_path, *EXPORTING, "run.dtype=fp8", "parallelism=single")
    checkpoint = read(run / "checkpoints" / "step_00000004")
    weights = load_file(run / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for name, weight in weights.items():
        assert torch.equal(checkpoint[f"model/{name}"].bfloat16(), weight)
    assert json.loads((run / "run.json").read_text())["float8"] == {
        "recipe": "rowwise",
        "all_gather": False,
        "emulated": True,
        "layers": 14,
        "in_bf16": [],
    }
    assert "products in float8: recipe rowwise" in (run / "train.log").read_text()


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("bf16"), "run.dtype=bf16")


def losses(folder: Path, *options: str) -> list[float]:
    """Return the losses of 50 steps of the default model.

    Rows are short, because some processors multiply in bf16 at a hundredth of the speed of fp32.
    """
    run = run_here(folder, "data.max_length=32", "run.max_steps=50", *FEW_ROWS, *options)
    return [row["train/loss"] for row in rows(run, "train/loss")]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_curve_is_that_of_bf16(bf16: list[float], tmp_path: Path, recipe: str) -> None:
    """All differences of 50 steps of the default model are below 2 %, and there are some."""
    fp8 = losses(tmp_path, "run.dtype=fp8", f"parallelism.fp8_recipe={recipe}")
    assert len(bf16) == 50
    assert fp8 == pytest.approx(bf16, rel=0.02)
    assert fp8 != bf16
    assert bf16[-1] < bf16[0] - 1
