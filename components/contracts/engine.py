"""The engine: it holds the model and the optimizer, and every rank calls it alike."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.loss import Loss, LossEngine

Kernels = Literal["auto", "torch", "liger"]
"""What computes norms and MLPs: torch, liger-kernel, or whichever suits the device."""

Reference = Literal["none", "frozen", "adapter_off"]
"""What an engine keeps for reference passes: nothing, a second model that is never trained, or the switch
that takes dropout and the adapter, if there is one, off its model."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step; the same on every rank."""

    loss: float
    """Sum over terms of ``term sum / term count``, global."""
    grad_norm: float
    """L2 norm over every parameter, before clipping."""
    skipped: bool
    """The loss or a gradient was not finite, or the loss too high: nothing was updated, on any rank."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    """Zero entries of the gradient, where counting was asked for."""


class Engine(LossEngine, Protocol):
    """Holds the model and the optimizer. Every method is collective: all ranks call it, in the same order.

    A train step is ``begin``, any number of ``train_microbatches``, then ``finish`` or ``abort``; a second
    begin or a stray finish is an error.
    """

    device: torch.device
    dp_rank: int
    """This rank's share of every global batch ..."""
    dp_size: int
    """... out of so many."""

    def begin_train_step(self, microbatches: Sequence[Batch] | None = None, loss: Loss | None = None) -> None:
        """Counts what the terms of the loss and of the model run over, and all-reduces it over data ranks.

        Without arguments (one-term losses, models that add no terms) the counts add up during the step.
        """

    def train_microbatches(self, microbatches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        """Forward and backward; gradients add up and nothing is normalised.

        ``last``: no more will come in this step, so gradients may be reduced while they are computed.
        """

    def finish_train_step(self, lr: float, *, max_loss: float = math.inf) -> StepResult:
        """Divides by the main count once, clips, and updates.

        Every rank skips the update where the loss or a gradient is not finite, or the loss is over
        ``max_loss``, which is the same on every rank.
        """

    def abort_train_step(self) -> None:
        """Drops gradients and sums; weights and optimizer are as before ``begin``. Twice is harmless."""

    def max_over_ranks(self, value: float) -> float:
        """The largest ``value`` of all ranks of the run, through host memory: no GPU waits for it."""

    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        """Global ``loss`` and metrics over ``batches``, with the sums and counts of training."""

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint, by key: its part of weights, moments (fp32) and RNG.

        Keys are those of ``components.checkpoint.dcp``; a DTensor says which part it is. Tensors may be
        the engine's own memory, and hold until the next step.
        """

    def load(self, path: Path) -> None:
        """Reads a checkpoint of ``tensors`` of any engine, in any layout."""

    def export(self, path: Path) -> None:
        """Writes a Hugging Face model folder (weights and config) in the run's dtype."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def describe(self) -> dict[str, Any]:
        """Engine, device, world size and the mesh as it was really built."""

    def close(self) -> None:
        """Leaves every process group; the process may build another engine afterwards."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine computes, besides its model, its optimizer and its layout."""

    dtype: torch.dtype
    device: Literal["cpu", "cuda"]
    seed: int = 0
    reference: Reference = "none"
    reference_model: Any = None
    """The model of a ``frozen`` reference. None means that it is the trained one as it was initially."""
    adapter: Any = None
    """None means that the model itself is trained."""
    compiled: bool = False
    kernels: Kernels = "auto"
    count_zeros: bool = False
    timeout_s: float = 0
    """Collectives wait longer than this for a peer."""
