"""What is estimated of a run before it starts: its workload, and what a rank holds and sends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from components.contracts.engine import Reference
from components.contracts.loss import Loss


@dataclass(frozen=True)
class MicrobatchShape:
    """What the largest micro-batch of a run asks of a rank, known before any starts."""

    rows: int
    """Rows of a micro-batch."""
    length: int
    """Tokens of its longest row: those of a packed one, else of the longest sample."""
    labels: int
    """Labelled positions in it, at most."""
    num_microbatches: int
    """Of one step, on one data rank."""


@dataclass(frozen=True)
class MemoryInputs:
    """What the memory of a train step depends on, beside model, optimizer and layout."""

    world_size: int
    dtype: torch.dtype
    device: Literal["cpu", "cuda"]
    microbatch: MicrobatchShape
    loss: Loss
    reference: Reference
    reference_model: Any = None
    """Of ``frozen``, the model of the second copy, on the meta device; None: it is the same."""
    adapter: Any = None


@dataclass(frozen=True)
class RankMemory:
    """What a rank of one pipeline stage holds at the peak of a train step, in bytes."""

    stage: int
    """0 where there are no others."""
    parts: Mapping[str, int]
    """By what it is for: weights, gradients, moments, activations ..."""
    host: Mapping[str, int] = field(default_factory=dict)
    """What lies in host memory beside the GPU's: offloaded state."""

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class ModelSize:
    """What the cost of a layout depends on, of a model."""

    parameters: int
    trained: int
    """Those that want a gradient; of an adapter, all of its own."""
    layers: int
    hidden: int
    q_width: int
    """Heads x head_dim: the width of queries and that of outputs, or the mean of the two."""
    kv_width: int
    """Key-value heads x head_dim: the width of keys and that of values, or the mean."""
    experts: int = 0
    """Of ``parameters``, those of experts ..."""
    trained_experts: int = 0
    """... and of ``trained``."""
    num_moe_layers: int = 0
    """Layers that have experts."""
    top_k: int = 0
    """Experts that a token passes in each of them."""


@dataclass(frozen=True)
class CommVolume:
    """What a rank sends to the others of one dimension of the mesh, in one step."""

    dimension: str
    """Of the mesh, ``host``: between a GPU and the memory of its host; or what ``span`` is given for."""
    num_bytes: float
    when: Literal["within", "behind", "after"]
    """While the computation waits for it, behind computation, or once it is over."""
    span: int | None = None
    """How many neighbouring ranks take part, where that is no dimension of the mesh."""


@dataclass(frozen=True)
class StepCost:
    """What a layout adds to the arithmetic of a step."""

    volumes: Sequence[CommVolume]
    bubble: float
    """Of the time of a pipeline stage, how much it waits for others; 0 where there is one."""
    recomputed: Literal["none", "full", "selective"]
    """What the backward pass computes again: nothing, every block, or attention alone."""
