"""Sums of loss terms and metrics, with their counts, over one train step or one evaluation."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from components.contracts.device_copy import to_device
from components.contracts.loss import LossOutput

NORM_BLOCK = 1024
"""Number of elements of a block of ``norm_of_blocks``."""


@dataclass
class LossAccumulator:
    """Unnormalized sums of loss terms and metrics over the micro-batches of this rank, with their counts.

    The sums stay on the device, so that the host does not wait within a step.
    """

    counts: Mapping[str, int] | None = None
    """Count of each term over all data ranks and micro-batches. None means that the counts are not known
    before the first forward pass."""
    main_apart: bool = False
    """Whether ``reduce`` also reports the main term, as ``lm_loss``: True if the model adds terms to the
    loss."""
    factor: float = 1.0
    """Factor by which the loss is multiplied in the backward pass, and by which gradients are divided at the
    end of the step."""
    terms: dict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))
    term_counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    metrics: dict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))
    metric_counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def scaled_loss(self, output: LossOutput) -> Tensor:
        """Return the scalar for the backward pass: ``factor`` times the sum of term * N_main / N_term.

        ``N_main`` and ``N_term`` are global counts. The sum is over all terms, of which the first is the main
        one.
        """
        main, *others = output.terms.items()
        if not others:
            return main[1] * self.factor
        assert self.counts is not None, "a loss of several terms needs its counts at begin_train_step"
        n_main = self.counts[main[0]]
        scaled = [term * (n_main / max(self.counts[name], 1)) for name, term in others]
        return torch.stack([main[1], *scaled]).sum() * self.factor

    def add(self, output: LossOutput, counts: Mapping[str, int]) -> None:
        """Add the sums and counts of one micro-batch."""
        for name, term in output.terms.items():
            self.terms[name] += term.detach().double()
            self.term_counts[name] += counts[name]
        for name, (total, count) in output.metrics.items():
            self.metrics[name] += total.double()
            self.metric_counts[name] += count

    def reduce(self, group: dist.ProcessGroup, device: torch.device) -> tuple[dict[str, float], int]:
        """Return ``(means, N_main)`` over all data ranks, in one all-reduce.

        ``means["loss"]`` is the sum over terms of sum / count, or NaN if the count of the main term is 0.
        Every other term is also reported under its own name, and with ``main_apart`` the main one as
        ``lm_loss``. Every data rank has the same names, because a rank without rows has run an empty
        micro-batch.
        """
        tables = (self.terms, self.term_counts, self.metrics, self.metric_counts)
        values = [value for table in tables for value in table.values()]
        on_host = [0.0 if isinstance(value, Tensor) else value for value in values]
        sent = to_device(torch.tensor(on_host, dtype=torch.float64), device)  # all in one copy
        pairs = zip(values, sent, strict=True)
        packed = torch.stack([v.to(device, torch.float64) if isinstance(v, Tensor) else n for v, n in pairs])
        dist.all_reduce(packed, group=group)
        numbers = iter(packed.tolist())
        terms, term_counts, metrics, metric_counts = ({name: next(numbers) for name in t} for t in tables)
        main, *others = term_counts
        parts = {name: terms[name] / count for name, count in term_counts.items() if count}
        means = {name: parts.get(name, math.nan) for name in others}
        if self.main_apart:
            means["lm_loss"] = parts.get(main, math.nan)
        means |= {name: metrics[name] / count if count else math.nan for name, count in metric_counts.items()}
        loss = math.fsum(parts.values()) if main in parts else math.nan
        return {"loss": loss, **means}, round(term_counts[main])


def global_norm(gradients: Iterable[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Return the L2 norm of the gradients over the shards of all ranks of ``group``, as a float64 scalar.

    Collective over ``group``. None means all ranks.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    if filled := [gradient for gradient in gradients if gradient.numel()]:
        total += tensor_norms(filled).square().sum()
    dist.all_reduce(total, group=group)
    return total.sqrt()


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each of the tensors, of which none is empty, as float64 ``[len(tensors)]``.

    A float32 sum of 500,000 squares is only accurate to 5e-5. On a GPU, all sums are in float64: one kernel
    reads many tensors and converts each element, while ``vector_norm`` would copy every tensor to float64.
    """
    if tensors[0].is_cpu:
        return torch.stack([norm_of_blocks(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


def norm_of_blocks(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a tensor in host memory as a float64 scalar, accurate to 3e-7.

    The squares of the elements must be within the range of float32. Norms of blocks are in float32, because a
    CPU needs five times as long to convert every element to float64. They are combined in float64, with that
    of the elements after the last whole block.
    """
    flat = tensor.reshape(-1)
    end = len(flat) - len(flat) % NORM_BLOCK
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norms = torch.linalg.vector_norm(flat[:end].view(-1, NORM_BLOCK), dim=1, dtype=dtype).double()
    last = torch.linalg.vector_norm(flat[end:], dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat((norms, last[None])))


def count_zeros(gradients: Iterable[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Count the zeros in the gradient shards of all ranks of ``group``; collective."""
    zeros = torch.zeros((), dtype=torch.int64, device=device)
    for gradient in gradients:
        zeros += (gradient == 0).sum()
    dist.all_reduce(zeros, group=group)
    return int(zeros.item())


def clip(gradients: list[Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients in place so that their global norm ``norm`` becomes at most ``max_norm``.

    None or 0 means that they are not clipped.
    """
    if max_norm and gradients and (factor := max_norm / (norm + 1e-6)) < 1:
        torch._foreach_mul_(gradients, factor)
