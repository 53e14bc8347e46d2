"""Numbers of elements of the parameters of a model in FSDP2's shards, block by block."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.parallelize import block_prefixes
from components.models.nf4 import BLOCK
from components.models.scalar_head import output_head
from components.preflight.estimates.activation_memory import (
    FP32,
)
from components.preflight.estimates.parameter_counts import ParallelSizes, Parameter, parameters

LAST_OF_MLP = ".mlp.down_proj.weight"
"""End of the name of the last matrix of an MLP."""


@dataclass(frozen=True)
class BlockParameters:
    """Parameters of a block, or of all modules outside of blocks, in elements except ``quantized_bytes``."""

    numel: int
    """Trained and frozen parameters of one tensor-parallel rank with its experts, before FSDP's sharding."""
    trained: int
    unsharded: int
    """``numel`` with the experts of all ep ranks."""
    unsharded_trained: int
    quantized_bytes: int = 0
    """Bytes of 4-bit matrices and their scales, which ``numel`` and ``unsharded`` leave out."""
    largest: int = 0
    """Elements of the largest of these matrices."""
    float8: int = 0
    """Elements of ``numel`` that are gathered in float8."""
    initial: int = 0
    """Elements of ``numel`` that are frozen in fp32."""
    before_mlp: int = 0
    """Elements of ``trained`` before the last matrix of a dense MLP, whose gradient is the first one that the
    backward pass computes. With experts, these are all elements of ``trained``: their results are multiplied
    by weights first. 0 without such a matrix."""
    experts: int = 0
    """Trained elements of experts."""
    ep_numel: int = 0
    """Elements of ``numel`` that are this rank's share of experts divided over ep ranks; 0 with ep 1. FSDP
    shards, gathers and reduces them in a process group of their own."""
    ep_trained: int = 0
    """Elements of ``trained`` of these."""
    ep_unsharded_trained: int = 0
    """Elements of ``unsharded_trained`` of these."""
    gathers_frozen: bool = True

    def gathered(self, size: int) -> int:
        """Return the bytes that FSDP gathers for computing in a dtype of ``size`` bytes."""
        if not self.gathers_frozen:
            return (self.trained + self.initial) * size
        return (self.numel - self.float8) * size + self.float8 + self.quantized_bytes

    def ep_gathered(self, size: int) -> int:
        """Return the part of the bytes of ``gathered`` that ep ranks split; it is gathered separately."""
        return (self.ep_numel if self.gathers_frozen else self.ep_trained) * size

    def dequantized_bytes(self, size: int) -> int:
        """Return the bytes of the largest 4-bit matrix, dequantised for a product, and of its fp32 scales.

        ``size`` is the number of bytes of a value.
        """
        return self.largest * size + -(-self.largest // BLOCK) * FP32


@dataclass(frozen=True)
class ModelParameters:
    """Numbers of elements of the parameters of a model on one tensor-parallel rank."""

    blocks: tuple[BlockParameters, ...]
    root: BlockParameters
    """Parameters outside of blocks: embedding, last norm and head."""
    embedding: int
    """Elements of the embedding, 0 if it is frozen."""
    head: int
    """Elements of the head, tied or not, 0 if it is frozen."""

    @property
    def parts(self) -> tuple[BlockParameters, ...]:
        return (*self.blocks, self.root)

    @property
    def unsharded_trained(self) -> int:
        return sum(part.unsharded_trained for part in self.parts)

    @property
    def unsharded_frozen(self) -> int:
        return sum(part.unsharded for part in self.parts) - self.unsharded_trained

    def frozen_bytes(self, size: int) -> int:
        extra = sum(part.quantized_bytes + part.initial * (FP32 - size) for part in self.parts)
        return self.unsharded_frozen * size + extra


def count_parameters(
    model: PreTrainedModel,
    layout: FSDP2Layout,
    shards: int,
    adapter: LoRA | None = None,
    in_float8: Collection[str] = (),
) -> ModelParameters:
    """Count the parameters of one tensor-parallel rank, which are sharded over ``shards`` ranks.

    Weights of layers ``in_float8`` are gathered in float8.
    """
    prefixes = block_prefixes(model)
    found: list[list[Parameter]] = [[] for _ in range(len(prefixes) + 1)]
    for parameter in parameters(model, ParallelSizes(layout.tp, layout.ep, layout.tp), adapter):
        inside = (number for number, prefix in enumerate(prefixes) if parameter.name.startswith(prefix))
        found[next(inside, len(prefixes))].append(parameter)
    *inner, root = (
        replace(count_block(each, layout.ep, in_float8), gathers_frozen=layout.gathers_frozen(shards))
        for each in found
    )
    saved = () if adapter is None else adapter.shapes(model)
    names = {module: f"{name}.weight" for name, module in model.named_modules()}

    def trained(end: nn.Module) -> int:
        weight = end.get_parameter("weight")
        is_trained = weight.requires_grad if adapter is None else names[end] in saved
        return -(-weight.numel() // layout.tp) if is_trained else 0

    embedding, last = trained(model.get_input_embeddings()), trained(output_head(model))
    return ModelParameters(tuple(inner), root, embedding, last)


def count_block(found: Sequence[Parameter], ep: int, in_float8: Collection[str]) -> BlockParameters:
    trained, plain = [p for p in found if p.trained], [p for p in found if not p.quantized_bytes]
    last = sum(p.numel for p in trained if p.name.endswith(LAST_OF_MLP))
    number, experts = (sum(p.numel for p in trained if kind or p.of_experts) for kind in (True, False))
    before = number if any(p.of_experts for p in found) else number - last if last else 0
    return BlockParameters(
        numel=sum(p.numel for p in plain),
        trained=number,
        unsharded=sum(p.numel * (ep if p.of_experts else 1) for p in plain),
        unsharded_trained=sum(p.numel * (ep if p.of_experts else 1) for p in trained),
        quantized_bytes=sum(p.quantized_bytes for p in found),
        largest=max((p.numel for p in found if p.quantized_bytes), default=0),
        float8=sum(p.numel for p in plain if p.name.removesuffix(".weight") in in_float8),
        initial=sum(p.numel for p in found if p.initial),
        before_mlp=before,
        experts=experts,
        ep_numel=sum(p.numel for p in plain if p.of_experts) if ep > 1 else 0,
        ep_trained=experts if ep > 1 else 0,
        ep_unsharded_trained=experts * ep if ep > 1 else 0,
    )
