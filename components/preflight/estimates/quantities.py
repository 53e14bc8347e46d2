"""Inputs and results of the estimates: workload, memory and communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from components.contracts.device import DeviceKind
from components.contracts.engine import Reference
from components.contracts.loss import Loss


@dataclass(frozen=True)
class MicrobatchShape:
    """Shape of the largest micro-batch of a run."""

    rows: int
    """Number of rows of the micro-batch."""
    length: int
    """Number of tokens of its longest row."""
    labels: int
    """Largest number of labelled positions in a micro-batch."""
    num_microbatches: int
    """Number of micro-batches per step on one data-parallel rank."""
    no_grad_ratio: float = 0.0
    """Number of tokens that only passes without gradient process, such as those of KTO's mismatched answers,
    divided by the number of trained tokens."""
    longest_sequence: int | None = None
    """Number of tokens of the longest sequence of the epoch. None means ``length``."""


@dataclass(frozen=True)
class MemoryInputs:
    """Inputs of the memory estimate in addition to model, optimizer and layout."""

    world_size: int
    dtype: torch.dtype
    device: DeviceKind
    microbatch: MicrobatchShape
    loss: Loss
    reference: Reference
    reference_model: Any = None
    """Model of a frozen reference, on the meta device. None means that it is the trained model."""
    adapter: Any = None
    float8: bool = False
    """Whether matrix products of linear layers are in float8."""
    weight_copies: int = 0
    """Number of fp32 copies of the trained weights that hooks keep."""
    tiled_norms: bool = False
    """Whether FSDP2 computes norms in tiles, whose temporary tensors are small."""
    packed: bool = True
    """Whether the sequences of a micro-batch are in one row."""


@dataclass(frozen=True)
class CommInputs:
    """Inputs of the communication estimate in addition to model and layout."""

    world_size: int
    dtype: torch.dtype
    tokens: float
    """Number of tokens of one data-parallel rank in one step."""
    num_microbatches: int
    forward_passes: int = 0
    """Number of forward passes without gradient in a step, each over as many tokens as are trained."""
    forward_calls: int = 0
    """Number of calls of the model or its reference for these passes, each with all tokens that it needs."""
    merges: bool = True
    """Whether a call merges micro-batches, so that weights are gathered once."""
    stage: int | None = None
    """Number of the pipeline stage of the rank. None means the stage that sends the most to other stages."""
    whole_weights: bool = False
    """Whether the optimizer updates each full (unsharded) weight on one rank, its owner."""
    synced: float = 0
    """Share of the steps after which the trained weights are mixed into the reference."""


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of a rank of one pipeline stage, in bytes."""

    stage: int
    """Number of the pipeline stage, 0 without pipelining."""
    parts: Mapping[str, int]
    """Bytes on the device by use: weights, gradients, moments, activations and others."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of offloaded state in host memory, by use."""

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that determine the communication of a layout."""

    parameters: int
    trained: int
    """Number of trained parameters. With an adapter, these are only those of the adapter."""
    layers: int
    hidden: int
    q_width: int
    """Heads x head_dim, the mean of the widths of queries and outputs."""
    kv_width: int
    """Key-value heads x head_dim, the mean of the widths of keys and values."""
    kv_heads: int
    scalar_head: bool = False
    """Whether the head is that of a reward model, which no rank splits."""
    outside_blocks: int = 0
    """Number of parameters outside of blocks: embedding, last norm and head."""
    experts: int = 0
    """Number of expert parameters."""
    trained_experts: int = 0
    """Number of trained expert parameters."""
    mtp_layers: int = 0
    """Number of the ``layers`` that predict a later token (MTP)."""
    num_experts: int = 0
    """Number of experts of a MoE layer."""
    num_moe_layers: int = 0
    """Number of MoE layers."""
    top_k: int = 0
    """Number of experts per token and MoE layer."""
    has_shared_experts: bool = False
    quantized: int = 0
    """Number of 4-bit parameters."""
    quantized_bytes: int = 0
    """Bytes of these parameters and their scales."""
    float8: int = 0
    """Number of parameters whose products are in float8."""
    shared_by_stages: int = 0
    """Number of trained parameters that the first and the last pipeline stage both hold: the embedding."""

    @property
    def all_trained(self) -> bool:
        return self.trained == self.parameters


@dataclass(frozen=True)
class CommVolume:
    """Bytes that a rank sends along one dimension of the mesh in one step."""

    dimension: str
    """Dimension of the mesh, ``host`` for copies between GPU and host memory, or any name if ``span`` is
    given."""
    num_bytes: float
    when: Literal["exposed", "overlapped", "at_end"]
    """Whether the computation waits for the communication (``exposed``), overlaps with it, or is over before
    it begins (``at_end``)."""
    span: int | None = None
    """Number of neighbouring ranks that take part. None means the ranks of ``dimension``."""


@dataclass(frozen=True)
class StepCost:
    """Costs that a layout adds to the FLOPs of a step."""

    volumes: Sequence[CommVolume]
    bubble: float
    """Fraction of its time that a stage is idle in the pipeline bubble, 0 without pipelining."""
    recomputed: float
    """Share of the blocks that the backward pass recomputes as a whole."""
    recomputed_modules: Mapping[str, float]
    """For each module that the backward pass recomputes in all blocks, the share of its FLOPs."""
    padding: float = 0.0
    """FLOPs of padded tokens in MoE layers, divided by those of other tokens."""
