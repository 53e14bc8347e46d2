"""The comparison of two layouts of a proof: which differences it accepts, and which it reports."""

import json
import math
from pathlib import Path

import pytest
import torch

from components.checkpoint.dcp import save_tensors
from components.contracts.errors import TrainingError
from components.proof.steps import SCALE
from components.proof.verdict import Errors, compare
from runner.launch.prove import conclude

EQUAL, OTHER = Errors("", 1e-7, "x", 0.0, 1e-6), Errors("", 0.5, "x", 0.0, 0.0)


def write(folder: Path, norms: list[float], **gradients: float) -> Path:
    """Write what ``ProofRun.take`` writes, for gradients of one element."""
    for kind in ("gradients", "control"):
        weights = {f"model/{name}": torch.ones(1) for name in gradients}
        save_tensors(folder / kind / "before", weights)
        after = {f"model/{name}": torch.tensor([1 - SCALE * value]) for name, value in gradients.items()}
        save_tensors(folder / kind / "after", after)
    (folder / "curve.json").write_text(json.dumps([[1.0, norm] for norm in norms]))
    return folder


def test_the_worst_parameter_and_the_curve(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", [2.0, 4.0], a=1.0, b=1e-3, unused=0.0)
    found = compare("", write(tmp_path / "found", [2.0, 4.1], a=1.0, b=1.1e-3, unused=0.0), reference)
    assert found.parameter == "b"
    assert found.gradient == pytest.approx(0.1, rel=1e-4)
    assert found.loss == 0
    assert found.grad_norm == pytest.approx(0.1 / 4)
    assert not found.equal
    assert compare("", reference, reference).equal


@pytest.mark.parametrize("gradients", [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": math.nan, "b": 1.0}])
def test_other_parameters_and_nan_are_not_equal(tmp_path: Path, gradients: dict[str, float]) -> None:
    reference = write(tmp_path / "reference", [1.0], a=1.0, b=1.0)
    assert not compare("", write(tmp_path / "found", [1.0], **gradients), reference).equal


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((EQUAL, EQUAL, EQUAL), "shows nothing"),
        ((OTHER, OTHER, OTHER), "2 and 1 rows in a micro-batch differ in one process already"),
        ((EQUAL, OTHER, OTHER), "this layout differs from one process, the gradient of x by 5.0e-01"),
    ],
)
def test_the_reason_is_told(found: tuple[Errors, Errors, Errors], said: str) -> None:
    conclude((EQUAL, EQUAL, OTHER), 1, 2)
    with pytest.raises(TrainingError, match=said):
        conclude(found, 1, 2)
