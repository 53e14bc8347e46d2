"""Rank function of test_compile.py."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from components.adapters import LoRA
from components.engines.fsdp2 import FSDP2
from components.engines.shared import varlen_attention
from tests.distributed.cases import Step, make_engine, next_token, share, step
from tests.distributed.gradients import capture


@dataclass(frozen=True)
class Compiled:
    step: Step
    graphs: int
    """Number of compiled graphs."""
    breaks: Mapping[str, int]
    """Number of graph breaks by reason."""


@contextmanager
def without_cpp() -> Iterator[None]:
    """Compile to graphs that are traced and differentiated, but not translated to C++, which is slow."""
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


def one_traced_step(on: FSDP2, family: str, adapter: LoRA) -> Compiled:
    with without_cpp():
        return one_step(on, family, "packed", adapter)


def one_step(on: FSDP2, family: str, layout: str, adapter: LoRA | None = None) -> Compiled:
    """Return a step of eight micro-batches of different lengths with compiled blocks."""
    torch._dynamo.reset()
    counters.clear()
    engine = make_engine(family, on=on, compiled=True, adapter=adapter)
    grads = capture(engine)
    result = step(engine, share(engine, layout, 1), next_token())
    engine.close()
    taken = counters["stats"]["unique_graphs"]
    return Compiled(Step(result.loss, result.grad_norm, grads), taken, dict(counters["graph_break"]))


def one_step_with_kernel(on: FSDP2, family: str) -> Compiled:
    """Return ``one_step`` with attention of packed rows in one call, as the kernel of a GPU computes it."""
    with (
        without_cpp(),
        mock.patch.object(varlen_attention, "has_kernel", always),
        mock.patch.object(varlen_attention, "varlen_kernel", masked_attention),
    ):
        return one_step(on, family, "packed")


def always(*_: object) -> bool:
    return True


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    _max_seqlens: tuple[int, int],
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute ``varlen_attention.varlen_kernel`` with a mask of the whole row."""
    assert window is None
    position = torch.arange(query.shape[2])
    sequence = torch.searchsorted(cu_seqlens[0], position, right=True)
    mask = (sequence[:, None] == sequence) & (position[:, None] >= position)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)
