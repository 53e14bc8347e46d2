"""Per-token statistics of the labels, computed in chunks so that the full logits never exist.

With logits ``z = h @ W.T + b``, label ``y`` and softmax ``p`` over a vocabulary of V, the gradients are
    d logp / dz = onehot(y) - p        d logsumexp / dz = p        d mean_logp / dz = 1 / V - p
Given logsumexp, the columns of ``dz`` are independent. So with a split vocabulary only the forward pass
communicates here; in the backward pass the caller sums the gradient of ``h`` over the ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from components.contracts.batch import IGNORE
from components.contracts.loss import TokenStats
from components.engines.shared import fused_softmax, generated_kernels
from components.engines.shared.added_product import CPU_BLOCK_BYTES, add_product
from components.engines.shared.fused_softmax import stats_dtype
from components.engines.shared.vocab_parallel import FullVocabulary, Vocabulary, VocabularyShard

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20, "xpu": 512 << 20, "npu": 512 << 20}
"""Size of the logits of one chunk in bytes, by device type. Logits are in fp32 unless the fused kernels are
used. For every chunk, the full gradient of the head is read and written once, which is cheap compared to the
matmul only if the chunk has many rows; a GPU needs more rows than a CPU. On a CPU with a vocabulary of 128k,
chunks of 64, 128 and 256 MiB took 3.3, 2.7 and 2.6 s in bf16, and 4.6, 4.4 and 4.8 s in fp32."""

GPU_TILE = 256
"""The rows of a chunk on a GPU are a multiple of this number, so that its matrix products compute no partly
filled tiles."""

CPU_ROWS = 512
"""Maximum number of rows of one chunk on a CPU. At V 16k, 2048 rows took the same time in fp32 and 8 % more
in bf16."""


def token_stats(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    head_bias: Tensor | None = None,
    requires: frozenset[str] = frozenset(),
    weights: Tensor | None = None,
    label_index: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> TokenStats:
    """Compute the statistics of every labelled position, as tensors in the shape of ``labels``.

    They are float32, or float64 if the inputs are, and 0 at the other positions.

    Args:
        hidden: ``[..., H]``, the output of the last norm. Logits are a matmul in its dtype, then upcast.
        head_weight: ``[V, H]`` in the dtype of ``hidden``, without padded rows.
        labels: int64 ``[...]``; only positions other than ``IGNORE`` are computed.
        head_bias: ``[V]``.
        requires: statistics besides ``logps``: names of other fields of ``TokenStats``.
        weights: float32 like ``labels``, given only if the loss is ``-(weights * logps).sum()`` times a
            number. The gradients are then computed in the forward pass, which saves one matmul of four. No
            statistics with a gradient may then be required.
        label_index: int64 ``[n]``, the positions of labels in ``labels.reshape(-1)``. None means that they
            are computed here, which makes the host wait.
        shard: with a vocabulary split over ranks, the rows that ``head_weight [n, H]`` and ``head_bias [n]``
            hold; n may differ by rank and be 0. Collective over the ranks of the group, which pass the same
            values for all other arguments and get the same statistics. The gradient of the head is that of
            its n rows. The gradient of ``hidden`` is only the part from these rows, and the caller sums it
            over the group.

    Without any label, the result is zero, but autograd still connects it to ``hidden`` and ``head_weight``.
    """
    assert hidden.dtype == head_weight.dtype, f"{hidden.dtype} hidden, {head_weight.dtype} head"
    flat = labels.reshape(-1)
    index = (flat != IGNORE).nonzero()[:, 0] if label_index is None else label_index
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
    vocabulary = shard or FullVocabulary(len(head_weight))
    fused = head_bias is None and generated_kernels.is_available(hidden)
    size = chunk_size(vocabulary, hidden.device, hidden.dtype if fused else stats_dtype(hidden))
    head = HeadChunking(vocabulary, size, requires, fused)
    inputs = (head, rows, head_weight, head_bias, flat.index_select(0, index))
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    logsumexp = mean_logp = log_squares = None
    if weights is not None and differentiable:
        assert requires <= {"correct"}, "a loss with weights is a sum of logps alone"
        logps, correct = WeightedStats.apply(*inputs, weights.reshape(-1).index_select(0, index))
    else:
        logps, logsumexp, mean_logp, log_squares, correct = ChunkedStats.apply(*inputs)

    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else Spread.apply(values, index, labels.shape)

    logps = spread(logps)
    assert logps is not None
    wanted = logsumexp if "logsumexp" in requires else None
    return TokenStats(logps, spread(wanted), spread(mean_logp), spread(log_squares), spread(correct))


def scalar_stats(hidden: Tensor, weight: Tensor) -> TokenStats:
    """Compute the output of a scalar head at every position.

    The product is in float32, because scores of long answers differ little.

    Args:
        hidden: ``[..., H]``, the output of the last norm.
        weight: ``[1, H]``.
    """
    dtype = stats_dtype(hidden)
    values = hidden.to(dtype) @ weight.to(dtype)[0]  # not a view, on which FSDP could lose its hooks
    return TokenStats(torch.zeros_like(values), values=values)


class Spread(torch.autograd.Function):
    """The values ``[n]`` at the positions ``index`` of a new tensor of ``shape`` that is 0 elsewhere.

    ``masked_scatter`` does the same, but the host waits for the device in its backward pass. The result is
    not a view, because FSDP loses its hooks on a view that is written in place.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(index)
        spread = values.new_zeros(shape)
        spread.view(-1).index_copy_(0, index, values)
        return spread

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].reshape(-1).index_select(0, index), None, None


def chunk_size(vocabulary: Vocabulary, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of positions per chunk of logits in ``dtype``.

    It is the same on all ranks that share the vocabulary, because each chunk is reduced over them.
    """
    rows = max(CHUNK_BYTES[device.type] // (dtype.itemsize * vocabulary.typical_rows), 1)
    return min(rows, CPU_ROWS) if device.type == "cpu" else rows - rows % GPU_TILE or rows


@dataclass(frozen=True)
class HeadChunking:
    """Options for computing logits and their statistics in chunks of positions.

    Tensors are separate arguments of the autograd functions, because autograd must see them.
    """

    vocabulary: Vocabulary
    chunk_size: int
    requires: frozenset[str]
    fused: bool
    """Whether the kernels of ``fused_softmax`` are used. Logits then stay in the dtype of the product."""

    def chunks(self, rows: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of positions and their logits ``[n, V]`` without bias, which the caller may overwrite.

        All chunks have the same memory, because a CPU gets every new large tensor in pages of zeros.
        """
        memory, size = rows.new_empty(min(self.chunk_size, len(rows)), len(weight)), self.chunk_size
        for chunk in (slice(start, start + size) for start in range(0, len(rows), size)):
            some = rows[chunk]
            yield chunk, torch.mm(some, weight.T, out=memory[: len(some)])

    def blocks(self, chunk: slice, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the positions and logits of the rows of ``chunk`` whose softmax is computed together.

        A split vocabulary is reduced over the ranks once for each chunk, which is then one block.
        """
        size = len(logits)
        if logits.is_cpu and isinstance(self.vocabulary, FullVocabulary):
            size = max(CPU_BLOCK_BYTES // (4 * self.vocabulary.size), 1)
        start = chunk.start
        for block in logits.split(size):
            yield slice(start, start := start + len(block)), block

    def upcast(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits in the dtype of the statistics: the same tensor if it has this dtype.

        The fused kernels read logits in their own dtype.
        """
        values = logits if self.fused else logits.to(stats_dtype(logits))
        return values if bias is None else values.add_(bias)

    def exponentiate(
        self, logits: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return ``(total, logsumexp, logps, others)``; ``others`` are the other required statistics by name.

        All are ``[n]``; ``total`` is the sum of ``exp(logits - max)`` over the vocabulary. Without fused
        kernels, ``logits`` become ``exp(logits - max)`` in place.
        """
        chosen = self.vocabulary.select_targets(logits, targets).to(stats_dtype(logits))
        largest, sums = self._fused_sums(logits) if self.fused else self._sums(logits)
        parts = {"chosen": chosen} | sums
        found = dict(zip(parts, self.vocabulary.reduce(tuple(parts.values())), strict=True))
        chosen, total = found.pop("chosen"), found.pop("total")
        logsumexp = largest + total.log()
        if "mean_logp" in found:
            found["mean_logp"] = found["mean_logp"] / self.vocabulary.size - logsumexp
        if "log_sum_sq_probs" in found:
            found["log_sum_sq_probs"] = found["log_sum_sq_probs"].log() - 2 * total.log()
        if "correct" in self.requires:
            found["correct"] = (chosen >= largest).to(chosen.dtype)
        return total, logsumexp, chosen - logsumexp, found

    def _sums(self, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the row maxima over all ranks, and this rank's sums for the required statistics by name.

        ``logits`` become ``exp(logits - max)`` in place.
        """
        largest, sums = self.vocabulary.reduce_max(row_max(logits)), {}
        if "mean_logp" in self.requires:
            sums["mean_logp"] = logits.sum(-1)
        sums["total"] = logits.sub_(largest[:, None]).exp_().sum(-1)
        if "log_sum_sq_probs" in self.requires:  # a norm: squares would be a second tensor of this size
            sums["log_sum_sq_probs"] = torch.linalg.vector_norm(logits, dim=-1).square()
        return largest, sums

    def _fused_sums(self, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        own, total, squares, plain = fused_softmax.row_sums(logits)
        largest = self.vocabulary.reduce_max(own.clone())
        factor = (own - largest).exp()
        sums = {"total": total * factor, "log_sum_sq_probs": squares * factor.square(), "mean_logp": plain}
        wanted = {"total", *self.requires}
        return largest, {name: value for name, value in sums.items() if name in wanted}

    def write_gradient(
        self,
        logits: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        logsumexp: Tensor,
        of_softmax: Tensor,
        of_target: Tensor,
        of_all: Tensor | None,
    ) -> None:
        """Replace ``logits [n, V]`` by their gradient.

        It is ``of_softmax * softmax + of_target * onehot(targets) + of_all``.
        """
        if self.fused:
            columns = targets - self.vocabulary.start
            fused_softmax.write_gradient(logits, logsumexp, of_softmax, columns, of_target, of_all)
            return
        values = self.upcast(logits, bias).sub_(logsumexp[:, None]).exp_().mul_(of_softmax[:, None])
        if of_all is not None:
            values.add_(of_all[:, None])
        self._store(values, logits, targets, of_target)

    def write_weighted_gradient(
        self, logits: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Replace ``logits [n, V]`` by the gradient of ``-(weights * logps).sum()``.

        Returns:
            ``(logps, others)``, as ``exponentiate``.
        """
        values = self.upcast(logits, bias)
        total, logsumexp, logps, others = self.exponentiate(values, targets)
        if self.fused:
            columns = targets - self.vocabulary.start
            fused_softmax.write_gradient(logits, logsumexp, weights, columns, -weights)
        else:
            self._store(values.mul_((weights / total)[:, None]), logits, targets, -weights)
        return logps, others

    def _store(self, values: Tensor, logits: Tensor, targets: Tensor, of_target: Tensor) -> None:
        """Add ``of_target`` to ``values`` at the targets, and write them to ``logits`` if they are a copy."""
        self.vocabulary.add_to_targets_(values, targets, of_target)
        if values.dtype != logits.dtype:
            logits.copy_(values)


def row_max(logits: Tensor) -> Tensor:
    """Return the maximum of every row, -inf for a rank without any column."""
    return logits.amax(-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -math.inf)


class Gradients:
    """Gradients of hidden rows ``[n, H]``, weight ``[V, H]`` and bias ``[V]``, computed in chunks of rows.

    Those that are not ``needed`` are None. Those of weight and bias are accumulated in at least fp32.
    """

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        self.rows_in, self.weight_in = rows, weight
        dtype = stats_dtype(rows)
        self.rows = torch.empty_like(rows) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needed[2] else None

    def add(self, chunk: slice, grad_logits: Tensor) -> None:
        if self.bias is not None:
            self.bias += grad_logits.sum(0, dtype=self.bias.dtype)
        if self.rows is not None:
            torch.mm(grad_logits, self.weight_in, out=self.rows[chunk])
        if self.weight is not None:
            add_product(self.weight, grad_logits.T, self.rows_in[chunk])

    def scale(self, by: Tensor) -> None:
        for part in (self.rows, self.weight, self.bias):
            if part is not None:
                part.mul_(by)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtype of the inputs."""
        dtype = self.rows_in.dtype
        parts = (self.rows, self.weight, self.bias)
        rows, weight, bias = (None if part is None else part.to(dtype) for part in parts)
        return rows, weight, bias


class ChunkedStats(torch.autograd.Function):
    """The fields of ``TokenStats`` for every row; the backward pass recomputes the logits by chunk."""

    @staticmethod
    def forward(
        ctx: Any, head: HeadChunking, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor | None, ...]:
        logps, logsumexp = (rows.new_empty(len(rows), dtype=stats_dtype(rows)) for _ in range(2))
        others = {name: torch.empty_like(logps) for name in head.requires - {"logsumexp"}}
        for chunk, whole in head.chunks(rows, weight):
            for at, logits in head.blocks(chunk, whole):
                _, logsumexp[at], logps[at], found = head.exponentiate(head.upcast(logits, bias), targets[at])
                for name, values in found.items():
                    others[name][at] = values
        ctx.head = head
        ctx.save_for_backward(rows, weight, bias, targets, logsumexp)
        constants = [others.get(name) for name in ("log_sum_sq_probs", "correct")]
        ctx.mark_non_differentiable(*(values for values in constants if values is not None))
        return logps, logsumexp, others.get("mean_logp"), *constants

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ChunkedStats.gradients(ctx, *grads).result(), None

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> Gradients:
        """Return all gradients. No logits are left when the caller converts them."""
        rows, weight, bias, targets, logsumexp = ctx.saved_tensors
        g_logp, g_logsumexp, g_mean = grads[:3]
        assert g_logp is not None
        assert g_logsumexp is not None
        g_softmax = g_logsumexp - g_logp if g_mean is None else g_logsumexp - g_logp - g_mean
        head: HeadChunking = ctx.head
        g_all = None if g_mean is None else g_mean / head.vocabulary.size
        total = Gradients(rows, weight, bias, ctx.needs_input_grad[1:4])
        for chunk, whole in head.chunks(rows, weight):
            for at, logits in head.blocks(chunk, whole):
                of_all = None if g_all is None else g_all[at]
                head.write_gradient(
                    logits, bias, targets[at], logsumexp[at], g_softmax[at], g_logp[at], of_all
                )
            total.add(chunk, whole)
        return total


class WeightedStats(torch.autograd.Function):
    """The ``logps``, and ``correct`` if required, for a loss ``-c * (weights * logps).sum()``.

    The forward pass computes the gradients for c = 1, and the backward pass multiplies them by c.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: HeadChunking,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        logps = rows.new_empty(len(rows), dtype=stats_dtype(rows))
        correct = torch.empty_like(logps) if "correct" in head.requires else None
        ctx.weights = weights = weights.to(logps.dtype)
        ctx.gradients = Gradients(rows, weight, bias, ctx.needs_input_grad[1:4])
        for chunk, whole in head.chunks(rows, weight):
            for at, logits in head.blocks(chunk, whole):
                logps[at], found = head.write_weighted_gradient(logits, bias, targets[at], weights[at])
                if correct is not None:
                    correct[at] = found["correct"]
            ctx.gradients.add(chunk, whole)
        if correct is not None:
            ctx.mark_non_differentiable(correct)
        return logps, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the gradients are scaled in place: there is no second backward"
        gradients, ctx.gradients = ctx.gradients, None
        gradients.scale(scale_of(grads[0], ctx.weights))
        return None, *gradients.result(), None, None


def scale_of(grad_logps: Tensor, weights: Tensor) -> Tensor:
    """Return c of ``grad_logps = -c * weights``, or 0 if all weights are 0."""
    squares = weights.double().square().sum()
    scale = -(weights.double() * grad_logps).sum() / torch.where(squares > 0, squares, 1)
    # Not checked on a GPU, because reading the result would stall the step.
    if grad_logps.device.type == "cpu":
        error = (grad_logps + scale * weights).abs().sum()
        # A loss that is not finite passes, because the engine skips its step.
        assert not error > 1e-4 * grad_logps.abs().sum(), "the loss is not -(weights * logps).sum()"
    return scale
