"""The engine, which holds the model and the optimizer."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.configs import WeightSource
from components.contracts.device import DeviceKind
from components.contracts.json_types import Json
from components.contracts.loss import Loss, LossEngine

Kernels = Literal["auto", "torch", "liger"]
"""The implementation of norms and MLPs: torch, liger-kernel, or the better one for the device."""

Reference = Literal["none", "frozen", "adapter_off"]
"""The model that computes reference passes: none, a second model that is frozen, or the engine's own model
with dropout and the adapter (if there is one) switched off."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank."""

    loss: float
    """Sum over terms of ``term sum / term count``, over the global batch."""
    grad_norm: float
    """L2 norm of the gradients of all parameters together, before clipping."""
    skipped: bool
    """Whether all ranks skipped the update, because the loss or a gradient was not finite or the loss was
    above ``max_loss``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    """Number of zero entries of the gradient. None means that they were not counted."""
    overflow: bool = False
    """Whether the update was skipped only because the loss scale was too large for gradients in fp16."""


class Engine(LossEngine, Protocol):
    """The object that holds the model and the optimizer.

    All ranks call its methods together, in the same order. Abstract methods are those that
    ``TrainStepEngine`` does not define.

    A train step is ``begin_train_step``, one or more ``train_microbatches`` (as many on every rank), then
    ``finish_train_step`` or ``abort_train_step``. It is an error to begin a second step before the end of the
    first, or to finish a step that has not begun.
    """

    device: torch.device
    dp_rank: int
    """Index of this rank's share of every global batch."""
    dp_size: int
    """Number of shares of a global batch."""

    def begin_train_step(self, microbatches: Sequence[Batch] | None = None, loss: Loss | None = None) -> None:
        """Begin a train step.

        ``microbatches`` are all micro-batches of this rank's share of the global batch. For each loss term,
        of ``loss`` or added by the model, the count that divides it (such as tokens) is summed over the
        data-parallel ranks. Both arguments may be omitted if ``loss`` has one term, the model adds none, and
        there is no loss scale for fp16; the count is then summed during the step.
        """

    @abstractmethod
    def train_microbatches(self, microbatches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        """Run forward and backward, and accumulate gradients without normalization.

        ``last`` means that these are the last micro-batches of the step. Gradients may then be reduced during
        the backward pass.
        """

    def finish_train_step(
        self,
        lr: float,
        *,
        max_loss: float = math.inf,
        before_update: Callable[[], object] | None = None,
    ) -> StepResult:
        """Divide the gradients by the count of the main loss term, clip them, and update the weights.

        Every rank skips the update if the loss or a gradient is not finite, or if the loss is above
        ``max_loss``, which is the same on every rank. ``before_update`` is called after the gradients have
        been divided and before they are clipped.

        Raises:
            NonRetryableError: if gradients overflow even with the smallest loss scale.
        """

    def layer_norms(self) -> dict[str, float]:
        """Return the L2 norm of the gradients of each layer, and of each weight outside of layers.

        It may only be called from ``before_update``.
        """

    def abort_train_step(self) -> None:
        """Discard gradients and sums, leaving weights and optimizer as before ``begin_train_step``.

        A second call does nothing.
        """

    def mix_reference(self, share: float) -> None:
        """Update the frozen reference: ``reference = share * trained + (1 - share) * reference``.

        The sum is computed in fp32, with the master weights of the trained model, and stored in the dtype of
        the reference.
        """

    @abstractmethod
    def keeping_random_streams(self) -> AbstractContextManager[None]:
        """Return a context manager that restores this rank's random states on exit."""

    @abstractmethod
    def allocated_optimizer_state(self) -> AbstractContextManager[None]:
        """Return a context manager in which the optimizer's state is allocated, as after an update.

        State that starts at zero, such as AdamW's, stays allocated after the context. State that only an
        update can create is dropped on exit.
        """

    def max_over_ranks(self, value: float) -> float:
        """Return the maximum of ``value`` over all ranks, reduced in host memory so that no GPU waits."""

    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        """Return the global ``loss`` and metrics over ``batches``: sums divided by counts, as in training."""

    @abstractmethod
    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """Return this rank's shards of weights, moments (fp32) and RNG states for a checkpoint, by key.

        Keys are those of ``components.checkpoint.dcp``; a DTensor specifies its shard. Tensors may share the
        engine's memory and are valid until the next step.
        """

    @abstractmethod
    def load(self, path: Path, *, model_only: bool = False) -> None:
        """Load a checkpoint of the ``tensors`` of any engine in any layout.

        With ``model_only``, only the weights to evaluate are loaded: the average of an optimizer such as
        schedule-free AdamW, or else the trained weights. No optimizer state is allocated.
        """

    @abstractmethod
    def export(self, path: Path) -> None:
        """Write a Hugging Face model folder (weights and config) in the dtype of the run."""

    def barrier(self) -> None:
        """Wait until every rank has called this method."""

    @abstractmethod
    def describe(self) -> Json:
        """Return the engine, device, world size and the mesh as actually built."""

    @abstractmethod
    def close(self) -> None:
        """Leave every process group, after which the process may build another engine."""


@dataclass(frozen=True)
class LossScaling:
    """Options of the loss scale, which changes by the rule of ``torch.amp.GradScaler``."""

    initial: float
    """The loss scale of the first step: the factor by which the mean loss is multiplied."""
    growth_interval: int
    """Number of steps without an overflow after which the loss scale is doubled."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine besides its model, its optimizer and its layout."""

    dtype: torch.dtype
    device: DeviceKind
    seed: int = 0
    reference: Reference = "none"
    sync_reference: bool = False
    """Whether the run calls ``mix_reference``. If it does, checkpoints contain the frozen reference."""
    reference_model: Any = None
    """The model of a ``frozen`` reference. None means the trained model with its initial weights."""
    adapter: Any = None
    """The adapter to train. None means that the model itself is trained."""
    compiled: bool = False
    kernels: Kernels = "auto"
    count_zeros: bool = False
    loss_scaling: LossScaling | None = None
    """Loss scaling for fp16. None means that the loss is not scaled."""
    timeout_s: float = 0
    """Lower bound of the timeout of collectives, in seconds."""
    float8: bool = False
    """Whether linear layers in decoder blocks multiply in float8. Everything else is in ``dtype``, which is
    then bf16."""
    restores: bool = False
    """Whether a checkpoint will be loaded, so that an adapter need not compute its initial values."""
    progress: Callable[[], object] | None = None
    """Function that is called before each read of an initial weight, so that a slow start is not considered
    hung. None means that nothing is called."""

    def watched(self, weights: WeightSource) -> WeightSource:
        """Return ``weights`` with a call of ``progress`` before each read."""

        def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            if self.progress is not None:
                self.progress()
            return weights(name, index)

        return read
