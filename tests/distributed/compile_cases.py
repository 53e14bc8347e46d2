"""Rank function of test_compile.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

from components.adapters import LoRA
from components.engines.fsdp2 import FSDP2
from tests.distributed.cases import Step, make_engine, next_token, share, step
from tests.distributed.gradients import capture


@dataclass(frozen=True)
class Compiled:
    step: Step
    graphs: int
    """Number of compiled graphs."""
    breaks: Mapping[str, int]
    """Number of graph breaks by reason."""


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
