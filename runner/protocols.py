"""The contracts between the loop and its components.

Everything an engine, a loss or a data loader must agree on is on this page. Components import nothing
else from ``runner`` (but for ``runner.errors``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that carries no loss."""

Kernels = Literal["auto", "torch", "liger"]
"""What computes norms and MLPs: torch, liger-kernel, or whichever suits the device."""

SampleKind = Literal["text", "chat", "preference"]
"""What one sample is: a document, a conversation, or a pair of conversations that share a prompt."""


@dataclass
class Batch:
    """One micro-batch. Packed: every sequence end to end in one row. Padded: one sequence a row.

    Labels are shifted already: ``labels[t]`` is the token that should follow ``input_ids[t]``.
    An empty micro-batch holds one padding token, no label and one sequence of length zero.
    """

    input_ids: Tensor
    """int64 ``[1, T]`` packed, ``[B, T]`` padded on the right."""
    labels: Tensor
    """int64, like ``input_ids``; ``IGNORE`` where there is no loss."""
    position_ids: Tensor
    """int64, like ``input_ids``; counts from 0 within every sequence, or from its prefix on."""
    seqlens: Tensor
    """int32 ``[S]``: real tokens of every sequence, padding and prefixes left out."""
    cu_seqlens: Tensor | None = None
    """int32 ``[S + 1]``, packed only: where every sequence begins, and the end of the last."""
    max_seqlen: int | None = None
    """Packed only: the longest span of ``cu_seqlens``, its prefix included."""
    prefix_lengths: Tensor | None = None
    """int32 ``[S]``, packed only: how many tokens from the start of the sequence before it a sequence sees
    beside its own, as if it began with them. None: no sequence sees another."""
    num_keys: int | None = None
    """With ``prefix_lengths``: their sum and T."""
    pair_index: Tensor | None = None
    """int64 ``[S]``, preference data: ``2 * pair`` for chosen, ``2 * pair + 1`` rejected, -1 for none."""
    ref_logps: Tensor | None = None
    """float32, like ``labels``: the reference model's log-probabilities, 0 where there is no label."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Numbers a loss attached in ``prepare``."""
    label_index: Tensor | None = None
    """See ``labelled``; whoever changes labels sets it to None."""

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on ``device``, but for ``pair_index``, which the host reads.

        From page-locked memory the host does not wait for the copy.
        """
        tensors = self._tensors() | {"label_index": self.labelled()}
        moved: dict[str, Any] = {k: tensor.to(device, non_blocking=True) for k, tensor in tensors.items()}
        return replace(self, **moved | {"pair_index": self.pair_index})

    def pin_memory(self) -> Self:
        """The same micro-batch in page-locked memory."""
        pinned: dict[str, Any] = {name: tensor.pin_memory() for name, tensor in self._tensors().items()}
        return replace(self, **pinned)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def labelled(self) -> Tensor:
        """int64 ``[n]``: the positions in ``labels.reshape(-1)`` that carry a label.

        A micro-batch that was moved to a device brings them along: asking the device, the host would wait.
        """
        if self.label_index is not None:
            return self.label_index
        return (self.labels.reshape(-1) != IGNORE).nonzero()[:, 0]

    @property
    def num_sequences(self) -> int:
        return self.seqlens.numel()

    def sequence_ids(self) -> Tensor:
        """int64, like ``labels``: the sequence every position belongs to."""
        if self.cu_seqlens is None:
            rows = torch.arange(self.num_sequences, device=self.labels.device)
            return rows[:, None].expand_as(self.labels)
        spans = self.cu_seqlens.diff().long()
        rows = torch.arange(self.num_sequences, device=self.labels.device)
        return rows.repeat_interleave(spans, output_size=self.labels.numel())[None]

    def sum_per_sequence(self, values: Tensor) -> Tensor:
        """Sums ``values`` (like ``labels``) over every sequence: float64 ``[S]``.

        In float64 because a 500-term sum in float32 is good to 5e-4 only.
        """
        total = values.new_zeros(self.num_sequences, dtype=torch.float64)
        return total.index_add(0, self.sequence_ids().reshape(-1), values.reshape(-1).double())


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
    needs_reference: bool
    """Whether ``prepare`` asks the engine for log-probabilities of a frozen reference model."""

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
    """The loss or a gradient was not finite: nothing was updated, on any rank."""
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

    def begin_train_step(self, counts: Mapping[str, int] | None = None) -> None:
        """All-reduces ``counts`` over data ranks. None (one-term losses): they add up on the way."""

    def train_microbatches(self, microbatches: Sequence[Batch], loss: Loss, *, last: bool = False) -> None:
        """Forward and backward; gradients add up and nothing is normalised.

        ``last``: no more will come in this step, so gradients may be reduced while they are computed.
        """

    def finish_train_step(self, lr: float) -> StepResult:
        """Divides by the main count once, clips, and updates or skips."""

    def abort_train_step(self) -> None:
        """Drops gradients and sums; weights and optimizer are as before ``begin``. Twice is harmless."""

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        """``TokenStats.logps`` of each micro-batch without gradient; None off the last pipeline stage."""

    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        """Global ``loss`` and metrics over ``batches``, with the sums and counts of training."""

    def save(self, path: Path, *, model_only: bool = False) -> None:
        """Writes this rank's part of weights, moments and RNG under Hugging Face parameter names."""

    def load(self, path: Path) -> None:
        """Reads what ``save`` of any engine, in any layout, wrote."""

    def export(self, path: Path) -> None:
        """Writes a Hugging Face model folder (weights and config) in the run's dtype."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def describe(self) -> dict[str, Any]:
        """Engine, device, world size and the mesh as it was really built."""

    def close(self) -> None:
        """Leaves every process group; the process may build another engine afterwards."""


class ParallelismSpec(Protocol):
    """The ``parallelism`` group: a layout, and how to build its engine."""

    computes_prefixes: ClassVar[bool]
    """Whether its engine takes a ``Batch`` with ``prefix_lengths``."""

    def world_size(self, environ: Mapping[str, str], num_gpus: int) -> int:
        """Ranks of the run; ConfigError where they do not fit WORLD_SIZE."""

    def data_size(self, world_size: int) -> int:
        """Into how many shares a global batch is split."""

    def check(
        self,
        model: Any,
        optimizer: Any,
        *,
        world_size: int,
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
        compiled: bool = False,
        kernels: Kernels = "auto",
    ) -> None:
        """Raises ConfigError where the layout does not fit the run; called once, before any rank starts.

        ``model`` is the transformers model on the meta device.
        """

    def build(
        self,
        model: Any,
        optimizer: Any,
        *,
        seed: int,
        dtype: torch.dtype,
        device: Literal["cpu", "cuda"],
        with_reference: bool,
        count_zeros: bool,
        compiled: bool = False,
        kernels: Kernels = "auto",
    ) -> Engine:
        """Joins the process group and builds this rank's engine; every rank calls it."""
