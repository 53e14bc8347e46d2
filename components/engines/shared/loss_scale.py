"""The loss scale for fp16, in which the smallest gradients would otherwise underflow to zero."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_keys
from components.contracts.engine import LossScaling
from components.contracts.errors import NonRetryableError

KEY = "loss_scale"
"""Key in checkpoints: float64 ``[2]``, the scale and ``LossScale.steps``."""
GROWTH, BACKOFF = 2.0, 0.5
SMALLEST = 1.0
"""Minimum of the scale, as in Megatron-LM and DeepSpeed. ``torch.amp.GradScaler`` has no minimum."""


@dataclass
class LossScale:
    """The scale of the mean loss, equal on all ranks and changed by the rule of ``torch.amp.GradScaler``.

    The scale is halved after an overflow, and doubled after ``growth_interval`` steps without overflow.
    """

    value: float
    growth_interval: int
    steps: int = 0
    """Number of steps without overflow since the scale last changed."""

    @classmethod
    def build(cls, given: LossScaling | None) -> "LossScale | None":
        return None if given is None else cls(given.initial, given.growth_interval)

    def update(self, *, overflow: bool, accepted: bool) -> None:
        """Update the scale after a step. ``overflow`` means that some gradient was not finite.

        Raises:
            NonRetryableError: if there was an overflow although the loss was ``accepted`` (finite and not
                above the limit), and half the scale would be below ``SMALLEST``.
        """
        if overflow and accepted and self.value * BACKOFF < SMALLEST:
            raise NonRetryableError(
                f"gradients overflow in fp16 even with the loss scale {self.value:g}, and the smallest is "
                f"{SMALLEST:g}; use run.dtype=fp32, or bf16 if the device has it, or lower optimizer.lr."
            )
        self.steps = 0 if overflow else self.steps + 1
        if overflow:
            self.value = max(self.value * BACKOFF, SMALLEST)
        elif self.steps >= self.growth_interval:  # a resumed run may have another interval
            self.steps = 0
            if self.value * GROWTH <= torch.finfo(torch.float32).max:
                self.value *= GROWTH


def scale_tensors(scale: LossScale | None) -> dict[str, Tensor]:
    """Return the tensors of ``scale`` for a checkpoint, by key. There are none if ``scale`` is None."""
    return {} if scale is None else {KEY: torch.tensor([scale.value, scale.steps], dtype=torch.float64)}


def load_scale(path: Path, scale: LossScale | None) -> None:
    """Set ``scale`` from a checkpoint, or leave it unchanged if the checkpoint contains no loss scale.

    A checkpoint of a run in another dtype contains no loss scale.
    """
    if scale is not None and KEY in saved_keys(path):
        tensors = scale_tensors(scale)
        load_tensors(path, tensors)
        scale.value, steps = tensors[KEY].tolist()
        scale.steps = int(steps)
