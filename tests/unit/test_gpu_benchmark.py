"""The benchmark of a GPU records every cell, on a machine without a GPU too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import gpu_cells
from benchmarks.gpu.gpu_cells import ENGINES, Cell, Facts, Failed, Place, cells, our_speed, outcome, shapes
from benchmarks.gpu.gpu_speed import row
from components.contracts.batch import IGNORE, Batch
from tests.patience import patience


def works(place: Place, seconds: float) -> Facts:
    return {"device": place.device, "limit": seconds}


def breaks(_place: Place, _seconds: float) -> Facts:
    raise Failed("exit 1: out of memory", "")


def test_every_cell_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure does not end the others, and cells of an earlier call stay."""
    made = [
        Cell("broken", breaks, 9, {}),
        Cell("fine", works, 9, {}),
        Cell("lacking", works, 9, {"no_such_package": lambda: False}),
    ]
    monkeypatch.setattr(command, "cells", lambda _: made)
    output = tmp_path / "gpu.json"
    output.write_text('{"cells": {"earlier": {"status": "done"}}}')
    assert command.main(["--device", "cpu", "--output", str(output)]) == 1
    facts = json.loads(output.read_text())
    found = facts["cells"]
    assert found["earlier"] == {"status": "done"}
    assert found["broken"]["reason"] == "exit 1: out of memory"
    assert found["fine"]["status"] == "done"
    assert found["fine"]["limit"] == 9
    assert found["fine"]["command"].startswith("python -m benchmarks.gpu --device cpu")
    assert found["lacking"]["reason"] == "no_such_package not installed"
    assert facts["versions"]["torch"] == torch.__version__


def test_a_cell_without_time_is_skipped(tmp_path: Path) -> None:
    place = Place("cpu", tmp_path)
    found = command.measured(Cell("fine", works, 9, {}), place, left=3)
    assert found == {"status": "skipped", "reason": "no time left"}


def test_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_labels_of_other_programs_are_not_shifted() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    shifted = torch.tensor([[6, 7, IGNORE, 9, IGNORE]])  # sequences of three and of two tokens
    batch = Batch(ids, shifted, torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([3, 2]))
    assert row(batch)["labels"] == [IGNORE, 6, 7, IGNORE, 9]


def test_tests_are_counted_while_they_run() -> None:
    printed = """
[gw1] [ 10%] PASSED tests/gpu/test_a.py::test_one[0.6B bf16]
tests/gpu/test_a.py::test_two FAILED                     [ 20%]
FAILED tests/gpu/test_a.py::test_two - AssertionError
"""
    assert outcome(printed, "PASSED") == {"tests/gpu/test_a.py::test_one[0.6B bf16]"}
    assert outcome(printed, "FAILED") == {"tests/gpu/test_a.py::test_two"}


def test_each_model_has_each_program(tmp_path: Path) -> None:
    names = [cell.name for cell in cells(Place("cpu", tmp_path))]
    assert len(names) == len(set(names)) == 4 + 12 + 2
    assert names[0] == "tests/gpu"  # before cells whose time limits add up to more than the call has


def test_a_peak_is_rehearsed_beside_a_measurement_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cells, "speed", lambda *_: {"mfu": 0.5})
    tiny = shapes(Place("cpu", tmp_path))["tiny"]
    place, limit = Place("cuda", tmp_path), patience(60)
    found = our_speed((*tiny, *ENGINES["fsdp2"]), place, limit)
    assert found["mfu"] == 0.5
    assert 0 < found["rehearsed_peak_gib"] < 1
    refused = our_speed((*tiny, *ENGINES["fsdp2"], "parallelism.dp=3"), place, limit)
    assert "run.global_batch_size" in refused["no rehearsal"]


@pytest.mark.parametrize("part", ["tiny: fsdp2 eager", "tiny: megatron"])
def test_the_smallest_cells_run_on_a_cpu(part: str, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command.main(["--device", "cpu", "--only", part, "--output", str(output)])
    found: dict[str, Any] = json.loads(output.read_text())["cells"]
    assert found
    for name, facts in found.items():
        if facts["status"] == "skipped":
            assert facts["reason"].endswith("not installed"), name
            continue
        assert facts["status"] == "done", facts
        assert min(facts[key] for key in ("tokens_per_s", "mfu", "peak_memory_gib")) > 0
        assert facts["steps"] == 2
