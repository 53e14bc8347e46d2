"""Train steps and evaluations of every engine. Sums and gradients are divided once, at the end."""

import math
import re
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.checkpoint.dcp import all_gather_objects
from components.contracts.batch import Batch
from components.contracts.engine import Engine, EngineOptions, StepResult
from components.contracts.loss import Loss
from components.engines.shared.loss_accumulator import LossAccumulator, tensor_norms
from components.engines.shared.loss_scale import LossScale
from components.engines.shared.moe_losses import RouterState
from components.models import ModelSpec

MIXED_TOGETHER = 2**24
"""Number of elements of a weight that ``mix_reference`` mixes at a time, or one row if that has more."""


class TrainStepEngine(Engine):
    """Base class of engines with the methods that begin, finish and abort train steps, and that evaluate.

    A subclass sets the attributes, accumulates sums and gradients in ``train_microbatches``, and implements
    the abstract methods, which all ranks call together.
    """

    group: dist.ProcessGroup
    """The data ranks, over which sums and counts are reduced."""
    spec: ModelSpec
    options: EngineOptions
    routing: RouterState | None
    """The state of the MoE routers. None means that the model has no experts."""
    loss_scale: LossScale | None
    """The loss scale. None means that the loss is not scaled."""
    sums: LossAccumulator | None = None
    """Sums of the current step. None means that no step is in progress."""

    # ---- implemented by engines

    def reduce_sums(self, sums: LossAccumulator) -> tuple[dict[str, float], int]:
        """Return the means and the count of the main term, on every rank."""
        return sums.reduce(self.group, self.device)

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Sum the gradients over data ranks, if the last backward pass has not done so."""

    @abstractmethod
    def divide_gradients(self, divisor: float) -> None:
        """Divide every gradient by ``divisor``."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the L2 norm of the gradients over all ranks."""

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parts of the gradients with the weights' names on disk.

        No two ranks yield the same part.
        """

    @abstractmethod
    def count_zeros(self) -> int:
        """Count the zero entries of the gradients of all ranks."""

    @abstractmethod
    def apply_update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, whose norm is ``grad_norm``, and step the optimizer."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients."""

    @abstractmethod
    def cancel_backward(self) -> None:
        """Clear the state left by an interrupted backward pass or reduction."""

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """Switch off training behaviour, such as dropout, within the context."""

    @abstractmethod
    def evaluate_microbatches(self, microbatches: Sequence[Batch], loss: Loss, sums: LossAccumulator) -> None:
        """Add the loss of ``microbatches`` to ``sums``, without gradients."""

    @abstractmethod
    def reference_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(reference, trained)``: this rank's part of each weight in the reference and in the model.

        The caller changes ``reference`` in place.
        """

    # ---- the train step

    def begin_train_step(self, microbatches: Sequence[Batch] | None = None, loss: Loss | None = None) -> None:
        assert self.sums is None, "begin_train_step: the step before was neither finished nor aborted"
        counts = None
        if microbatches is not None and loss is not None:
            by_batch = [loss.counts(batch) | self.spec.counts(batch) for batch in microbatches]
            total = {name: sum(counts[name] for counts in by_batch) for name in by_batch[0]}
            # Every rank has the same names in the same order. No count reaches 2 ** 53.
            sums = self.sum_over_data(list(total.values()))
            counts = dict(zip(total, map(round, sums), strict=True))
        factor = 1.0
        if self.loss_scale is not None:
            # The scale applies to the mean loss: gradients of a sum over all labels would overflow in fp16.
            assert counts is not None, "a loss scale needs the counts at begin_train_step"
            factor = self.loss_scale.value / max(next(iter(counts.values())), 1)
        self.sums = LossAccumulator(counts, main_apart=self.spec.has_auxiliary_losses, factor=factor)
        if self.routing is not None:
            self.routing.begin(counts, factor)

    def finish_train_step(
        self,
        lr: float,
        *,
        max_loss: float = math.inf,
        before_update: Callable[[], object] | None = None,
    ) -> StepResult:
        assert self.sums is not None, "finish_train_step without begin_train_step"
        self.reduce_gradients()
        means, counts = None, self.sums.counts
        if counts is None:
            means, n_main = self.reduce_sums(self.sums)
        else:
            n_main = next(iter(counts.values()))
        self.divide_gradients(max(n_main, 1) * self.sums.factor)  # the only division of a step
        if means is None:  # the host waits here, when the division is queued already
            means, _ = self.reduce_sums(self.sums)
        grad_norm, loss = self.grad_norm(), means.pop("loss")
        zeros = self.count_zeros() if self.options.count_zeros else None
        if before_update is not None:
            before_update()
        if self.routing is not None:
            loss, added = self.routing.finish(loss)
            means |= added
        if max_loss < math.inf:  # so that rounding does not make ranks decide differently
            loss = self.max_over_ranks(loss)
        accepted, overflow = math.isfinite(loss) and loss <= max_loss, not math.isfinite(grad_norm)
        skipped = overflow or not accepted
        if not skipped:
            self.apply_update(lr, grad_norm)
            if self.routing is not None:
                self.routing.update_biases()
        self.zero_grad()
        self.sums = None
        if self.loss_scale is None:
            return StepResult(loss, grad_norm, skipped, means, zeros)
        means["loss_scale"] = self.loss_scale.value
        self.loss_scale.update(overflow=overflow, accepted=accepted)
        return StepResult(loss, grad_norm, skipped, means, zeros, overflow and accepted)

    def abort_train_step(self) -> None:
        self.sums = None
        if self.routing is not None:
            self.routing.abort()
        self.cancel_backward()
        self.zero_grad()

    def layer_norms(self) -> dict[str, float]:
        squares = defaultdict[str, float](float)
        filled = [(name, part) for name, part in self.named_gradients() if part.numel()]
        if filled:  # the host waits once, for all of them
            norms = tensor_norms([part for _, part in filled]).tolist()
            for (name, _), norm in zip(filled, norms, strict=True):
                squares[layer_of(name)] += norm**2
        total = Counter[str]()  # a pipeline stage has only some of the layers
        for of_rank in all_gather_objects(dict(squares), None):
            total.update(of_rank)
        return {layer: math.sqrt(square) for layer, square in sorted(total.items())}

    @torch.no_grad()
    def mix_reference(self, share: float) -> None:
        for kept, trained in self.reference_weights():
            # In pieces: fp32 copies of a whole embedding could be the peak of the step.
            rows = max(MIXED_TOGETHER * len(kept) // max(kept.numel(), 1), 1)
            for old, new in zip(kept.split(rows), trained.split(rows), strict=True):
                old.copy_(old.float().lerp(new.float(), share))

    # ---- without gradient

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Sequence[Batch]], loss: Loss) -> dict[str, float]:
        sums = LossAccumulator()
        with self.evaluating():
            for microbatches in batches:
                self.evaluate_microbatches(loss.prepare(microbatches, self), loss, sums)
        means, _ = self.reduce_sums(sums)
        return means

    # ---- between ranks

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        packed = torch.tensor(list(values), dtype=torch.float64)  # in host memory, so that no GPU waits
        dist.all_reduce(packed, group=self.group)
        total: list[float] = packed.tolist()
        return total

    @staticmethod
    def max_over_ranks(value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64)  # in host memory, so that no GPU waits
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def barrier(self) -> None:
        dist.barrier()


def layer_of(name: str) -> str:
    """Return the layer of a weight, such as ``model.layers.3``, or else its name without ``.weight``."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else name.removesuffix(".weight")


@contextmanager
def without_dropout(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put ``models`` into evaluation mode within the context."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)
