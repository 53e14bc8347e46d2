"""Token statistics over a vocabulary that is split over ranks, and the same from full logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.contracts.batch import IGNORE
from components.contracts.loss import TokenStats
from components.engines.shared import token_log_probs
from components.engines.shared.process_group import init_process_group
from components.engines.shared.vocab_parallel import VocabularyShard
from tests.chunked_stats import chunked_stats

V = 53
CORRECT = frozenset({"correct"})
ALL = frozenset({"logsumexp", "mean_logp", "log_sum_sq_probs"}) | CORRECT
Split = Sequence[tuple[int, int]]
"""First row and number of rows of each rank."""


@dataclass(frozen=True)
class Case:
    weighted: bool = False
    """Whether gradients are computed in the forward pass, for ``-0.37 * (weights * logps).sum()``."""
    bias: bool = False
    chunk_size: int = 7
    dtype: torch.dtype = torch.float32
    tokens: int = 33
    width: int = 16
    labelled: bool = True
    scale: float = 1.0
    """Factor of the hidden states."""
    nan_row: int | None = None
    label: int | None = None
    """Label of the first token. None means that it stays random."""
    fused: bool = False

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return hidden ``[1, tokens, width]``, weight ``[V, width]``, bias ``[V]`` and labels.

        About a third of the labels is ignored. Every third of the first 33 has the largest logit,
        unless the bias changes that.
        """
        g = torch.Generator().manual_seed(0)
        hidden = (self.scale * torch.randn(1, self.tokens, self.width, generator=g)).to(self.dtype)
        weight = torch.randn(V, self.width, generator=g).to(self.dtype)
        bias = torch.randn(V, generator=g).to(self.dtype) if self.bias else None
        labels = torch.randint(0, V, (1, self.tokens), generator=g)
        labels[:, :33:3] = (hidden[:, :33:3] @ weight.T).argmax(-1)
        labels[torch.rand(labels.shape, generator=g) < (0.35 if self.labelled else 2.0)] = IGNORE
        if self.nan_row is not None:
            weight[self.nan_row] = torch.nan
        if self.label is not None:
            labels[0, 0] = self.label
        return hidden, weight, bias, labels

    def weights(self) -> Tensor:
        g = torch.Generator().manual_seed(1)
        return torch.rand(1, self.tokens, generator=g) * (self.inputs()[-1] != IGNORE)

    def loss(self, stats: TokenStats) -> Tensor:
        """Return a sum of all statistics with different weights at every position."""
        if self.weighted:
            return -0.37 * (self.weights() * stats.logps).sum()
        g = torch.Generator().manual_seed(2)
        parts = (stats.logps, stats.logsumexp, stats.mean_logp)
        return sum((torch.randn(1, self.tokens, generator=g) * p).sum() for p in parts if p is not None)


@dataclass
class Answer:
    stats: list[Tensor]
    gradients: list[Tensor]
    """Gradients of hidden, weight and, if present, bias."""
    collectives: tuple[int, int] = (0, 0)
    """Numbers of collectives in the forward and in the backward pass."""
    largest: int = 0
    """Number of elements of the largest tensor that any operation returned."""


def answer(case: Case, rows: slice = slice(None), shard: VocabularyShard | None = None) -> Answer:
    """Return ``token_stats`` and the gradients of ``case.loss`` for ``rows`` of the head."""
    hidden, weight, bias, labels = case.inputs()
    inputs = [
        t.clone().requires_grad_() for t in (hidden, weight[rows]) + (() if bias is None else (bias[rows],))
    ]
    weights, requires = (case.weights(), CORRECT) if case.weighted else (None, ALL)
    with Watch() as watch:
        stats = chunked_stats(
            inputs[0],
            inputs[1],
            labels,
            head_bias=inputs[2] if case.bias else None,
            requires=requires,
            weights=weights,
            chunk_size=case.chunk_size,
            fused=case.fused,
            shard=shard,
        )
        forward = watch.collectives
        gradients = torch.autograd.grad(case.loss(stats), inputs)
    parts = [t.detach() for t in vars(stats).values() if t is not None]
    return Answer(parts, list(gradients), (forward, watch.collectives - forward), watch.largest)


def exact(case: Case, dtype: torch.dtype = torch.float64) -> Answer:
    """Compute the answer with ``torch.log_softmax`` of full logits; ``dtype`` is that of matmuls."""
    *inputs, labels = case.inputs()
    inputs = [t.to(dtype).requires_grad_() for t in inputs if t is not None]
    logits = inputs[0] @ inputs[1].T + (inputs[2] if case.bias else 0)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    keep = labels != IGNORE
    logp = logits.log_softmax(-1)
    chosen = logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    squares = (2 * logp.detach()).logsumexp(-1)
    correct = (logits.argmax(-1) == labels).to(chosen.dtype)
    stats = TokenStats(
        chosen * keep, logits.logsumexp(-1) * keep, logp.mean(-1) * keep, squares * keep, correct
    )
    stats = replace(stats, **dict.fromkeys(ALL - CORRECT)) if case.weighted else stats
    parts = [t.detach() for t in vars(stats).values() if t is not None]
    return Answer(parts, list(torch.autograd.grad(case.loss(stats), inputs)))


class Watch(TorchDispatchMode):
    """Counts collectives and records the size of the largest tensor that any operation returned."""

    collectives = 0
    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.collectives += func.namespace == "c10d"
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


def on_ranks(split: Split, cases: Sequence[Case], chunk_bytes: int | None, size: int) -> list[Answer]:
    """Return the answers of one rank of ``split``. ``chunk_bytes`` replaces the default size of a chunk."""
    init_process_group("cpu")
    start, rows = split[dist.get_rank()]
    default = token_log_probs.CHUNK_BYTES["cpu"]
    token_log_probs.CHUNK_BYTES["cpu"] = chunk_bytes or default
    try:
        shard = VocabularyShard(dist.group.WORLD, start, size)
        return [answer(case, slice(start, start + rows), shard) for case in cases]
    finally:
        token_log_probs.CHUNK_BYTES["cpu"] = default
