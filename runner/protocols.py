"""The contracts between the loop and its components.

Everything an engine, a loss or a data loader must agree on is on this page, and in ``batch``, whose names
it has too. Components import nothing else from ``runner`` (but for ``runner.errors``, and preflight
``runner.estimates``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from runner.batch import DESIRABLE as DESIRABLE
from runner.batch import IGNORE as IGNORE
from runner.batch import MISMATCHED as MISMATCHED
from runner.batch import UNDESIRABLE as UNDESIRABLE
from runner.batch import Batch as Batch

Kernels = Literal["auto", "torch", "liger"]
"""What computes norms and MLPs: torch, liger-kernel, or whichever suits the device."""

ReferenceChoice = Literal["auto", "frozen", "adapter_off", "precomputed", "none"]
"""``stage.reference``: where a reference's log-probabilities come from. ``auto``: ``adapter_off`` where there
is an adapter that can be switched off, else ``frozen``. ``precomputed``: from a cache that is filled before
the first step, whence the data loader attaches them to every ``Batch``."""

Reference = Literal["none", "frozen", "adapter_off"]
"""What an engine keeps for reference passes: nothing, a second model that is never trained, or the switch
that takes dropout and the adapter, if there is one, off its model."""

SampleKind = Literal["text", "chat", "preference", "unpaired"]
"""What one sample is: a document, a conversation, a pair of conversations that share a prompt, or a prompt
with one answer and whether it is desirable."""


@dataclass(frozen=True)
class TokenStats:
    """What a loss may know of the model: float32 tensors like ``Batch.labels``, 0 where there is no label.

    With logits ``z`` over the vocabulary (padded rows excluded) and label ``y``.
    """

    logps: Tensor
    """``z[y] - logsumexp(z)``"""
    logsumexp: Tensor | None = None
    """``logsumexp(z)``"""
    mean_logp: Tensor | None = None
    """``mean(z) - logsumexp(z)``: the mean log-probability over the vocabulary (label smoothing)."""


@dataclass(frozen=True)
class LossOutput:
    """Un-normalised sums over one micro-batch."""

    terms: Mapping[str, Tensor]
    """Scalar sums that are minimised; each is divided by its own global count. The first is the main term."""
    metrics: Mapping[str, tuple[Tensor, int]] = field(default_factory=dict)
    """name -> (detached sum, count): only reported."""


class Loss(Protocol):
    """A pure function of ``(stats, batch)``; a new loss works in every layout the day it is written."""

    kind: SampleKind
    requires: frozenset[str]
    """Statistics needed beside ``logps``: a subset of ``{"logsumexp", "mean_logp"}``."""
    reference: ReferenceChoice
    """Whose log-probabilities ``prepare`` attaches; ``none``: it attaches none, or zeros."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Per term, in the order of ``LossOutput.terms``, what its sum runs over; from labels alone."""

    def weights(self, batch: Batch) -> Tensor | None:
        """``w`` like ``labels`` if the loss is exactly ``-(w * logps).sum()``, else None.

        Engines use it to form the gradient of the output head in the forward pass.
        """

    def prepare(self, microbatches: Sequence[Batch], engine: "Engine") -> Sequence[Batch]:
        """Attaches what needs another forward pass or another rank. Every rank calls it together."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput: ...


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


class SchedulerSpec(Protocol):
    """A pure function of the step: nothing to checkpoint, the same on every engine."""

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        """The learning rate of the update after ``step`` completed ones."""

    def check(self, *, peak: float, total_steps: int) -> None:
        """Raises ConfigError where the schedule does not fit the run."""


@dataclass(frozen=True)
class BatchStats:
    """One global batch, known on every rank from the plan alone."""

    num_tokens: int
    """Non-padding input tokens of the samples."""
    num_computed_tokens: int
    """The same, with those that several sequences share counted once."""
    num_samples: int
    num_labels: int
    seqlen_mean: float
    seqlen_max: int
    sum_squared_seqlens: int
    """For the cost of attention: a sequence of L tokens behind a shared prefix of n adds (n + L)^2 - n^2."""


class DataLoader(Protocol):
    """Global batches as a pure function of the step: resuming needs the step and nothing else."""

    @property
    def num_steps(self) -> int:
        """Global batches of the whole run."""

    def microbatches(self, step: int) -> list[Batch]:
        """This rank's share of global batch ``step``: equally many on every rank, empty ones included."""

    def stats(self, step: int) -> BatchStats: ...

    def sample_ids(self, step: int) -> list[str]:
        """Where a user finds the samples of global batch ``step`` in the data: ``data.train:17``."""

    def epoch(self, step: int) -> float:
        """Passes over the data completed once ``step`` global batches are done."""


class Engine(Protocol):
    """Holds the model and the optimizer. Every method is collective: all ranks call it, in the same order.

    A train step is ``begin``, any number of ``train_microbatches``, then ``finish`` or ``abort``; a second
    begin or a stray finish is an error.
    """

    device: torch.device
    data_rank: int
    """This rank's share of every global batch ..."""
    data_size: int
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

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        """``TokenStats.logps`` of each micro-batch without gradient; None off the last pipeline stage."""

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Adds up float64 ``values`` over data ranks; each pipeline stage and tensor rank for itself."""

    def max_over_ranks(self, value: float) -> float:
        """The largest ``value`` of all ranks of the run, through host memory: no GPU waits for it."""

    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        """Global ``loss`` and metrics over ``batches``, with the sums and counts of training."""

    def tensors(self, *, model_only: bool = False) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint, by key: its part of weights, moments (fp32) and RNG.

        Keys are those of ``components.checkpoint.format``; a DTensor says which part it is. Tensors may be
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


class ParallelismSpec(Protocol):
    """The ``parallelism`` group: a layout, and how to build its engine.

    ``components.preflight`` forecasts the memory and the time of those that it knows by their type.
    """

    computes_prefixes: ClassVar[bool]
    """Whether its engine takes a ``Batch`` with ``prefix_lengths``."""

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        """Ranks of the run; ConfigError where they do not fit WORLD_SIZE."""

    def data_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""

    def check(self, model: Any, optimizer: Any, options: EngineOptions, *, world_size: int) -> None:
        """Raises ConfigError where the layout does not fit the run; called once, before any rank starts.

        ``model`` is the transformers model on the meta device, without its adapter.
        """

    def build(self, model: Any, optimizer: Any, options: EngineOptions) -> Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
