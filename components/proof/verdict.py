"""Errors of the runs of a proof, relative to a run in one process."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.reader import StoredTensors
from components.contracts.json_types import Json
from components.proof.steps import SCALE

BOUND = 1e-5
"""Largest error at which two runs count as equal, relative to the norm of a gradient of the reference, or to
the largest value of its curve."""


def relative_error(found: Tensor, reference: Tensor) -> Tensor:
    """Return the relative error, which is infinite if only the reference is 0.

    It is 0 if both are 0, as for the gradient of an expert without tokens.
    """
    error = (found.double() - reference.double()).norm()
    return error / reference.double().norm() if error else error


def curve_error(found: Tensor, reference: Tensor) -> float:
    """Return the largest error relative to the largest value of the reference."""
    assert found.shape == reference.shape, f"{len(found)} steps, not {len(reference)}"
    return ((found - reference).abs().max() / reference.abs().max()).item()


@dataclass(frozen=True)
class Errors:
    """Errors of a run, relative to a run in one process. None means that there is no curve."""

    run: str
    gradient: float
    parameter: str
    """The name of the parameter with the largest error, or of one that only one of the two has."""
    loss: float | None = None
    grad_norm: float | None = None

    @property
    def equal(self) -> bool:
        errors = (self.gradient, self.loss, self.grad_norm)
        return all(error <= BOUND for error in errors if error is not None)  # NaN is not equal

    @property
    def worst(self) -> str:
        """A description of the errors of the gradient or, if that is within ``BOUND``, of the curve."""
        if not self.gradient <= BOUND:
            return f"the gradient of {self.parameter} by {self.gradient:.1e}"
        return f"the loss by {self.loss:.1e}, the gradient norm by {self.grad_norm:.1e}"

    def row(self) -> Json:
        """Return the row of a table, with numbers of one digit."""
        values = {"grad": self.gradient, "loss": self.loss, "norm": self.grad_norm}
        shown = {key: "" if value is None else f"{value:.0e}" for key, value in values.items()}
        parameter = self.parameter.removeprefix("model.").removesuffix(".weight")
        verdict = "equal" if self.equal else "differs"
        return {"run": self.run, **shown, "worst parameter": parameter, "verdict": verdict}


def compare(run: str, found: Path, reference: Path, *, control: bool = False) -> Errors:
    """Return the errors of the files that ``ProofRun.take`` wrote to ``found``.

    ``reference`` is the folder that it wrote in one process. With ``control``, the errors are those of the
    control, which has gradients only.
    """
    kind = "control" if control else "gradients"
    ours, theirs = first_gradients(found / kind), first_gradients(reference / kind)
    if others := sorted(ours.keys() ^ theirs.keys()):
        return Errors(run, torch.inf, others[0])
    errors = torch.stack([relative_error(ours[name], theirs[name]) for name in theirs])
    worst = int(errors.argmax())  # of a NaN, if there is one
    gradient, parameter = errors[worst].item(), list(theirs)[worst]
    if control:
        return Errors(run, gradient, parameter)
    curves = [
        torch.tensor(json.loads((at / "curve.json").read_text()), dtype=torch.float64)
        for at in (found, reference)
    ]
    loss, norm = (curve_error(*(curve[:, column] for curve in curves)) for column in (0, 1))
    return Errors(run, gradient, parameter, loss, norm)


def first_gradients(folder: Path) -> dict[str, Tensor]:
    """Return the gradients of the first step by parameter name, from the weights before and after it."""
    before, after = (StoredTensors(folder / name) for name in ("before", "after"))
    keys = [f"model/{name}" for name in before.shapes("model")]
    return {key.removeprefix("model/"): (before.read(key).double() - after.read(key)) / SCALE for key in keys}
