"""Sizes on an FSDP2 rank from which the memory at each moment of a train step is made up."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from components.engines.fsdp2.layout import FSDP2Layout
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    Bytes,
    RunShape,
)
from components.preflight.estimates.fsdp2_parameters import BlockParameters, ModelParameters

ROUNDING = 2 * FP32 + 1
"""Bytes per value while it is rounded to float8: two copies in fp32, and the result."""


@dataclass(frozen=True)
class RankQuantities:
    """Weights, gradients and activations of a rank, and the buffers of their exchange, in bytes."""

    weights: ModelParameters
    blocks: tuple[BlockActivations, ...]
    vocabulary: int
    """Number of rows of the head on this rank."""
    shards: int
    """Number of ranks that shard a parameter."""
    layout: FSDP2Layout
    num_microbatches: int
    offloads: bool
    """Whether weights, gradients and moments are offloaded from a GPU to host memory."""
    offloads_activations: bool
    """Whether activations of blocks are in host memory until their backward pass."""
    tokens: int
    """Number of tokens of a micro-batch on this rank."""
    labels: int
    """Maximum number of labels on this rank: a cp rank may have the end of every sequence."""
    rounded_width: int = 0
    """Largest number of channels that are rounded to float8 at once. 0 means that none are."""
    rounded_weight: int = 0
    """Number of elements of the largest weight that is rounded to float8."""
    no_grad_ratio: float = 0.0
    """See ``MicrobatchShape.no_grad_ratio``."""

    def between_steps(self, moments: float) -> Bytes:
        """Return the bytes between two steps: shards, in fp32 if they are trained.

        ``moments`` is the number of bytes of optimizer state per trained element.
        """
        trained = self.weights.unsharded_trained
        return {
            "weights": (trained * FP32 + self.weights.frozen_bytes(self.size)) // self.shards,
            "moments": int(trained * moments) // self.shards,
        }

    @property
    def num_mtp_layers(self) -> int:
        """Number of the last blocks, which predict a later token each, with the head once more."""
        return sum(block.is_mtp for block in self.blocks)

    def rounded(self, tokens: int) -> int:
        """Return the bytes for rounding the largest operand of a product in float8.

        ``BlockActivations.backward_of_mlp`` includes two gradients of an MLP. One of them does not exist yet
        at that time, so its bytes are subtracted.
        """
        return (ROUNDING - self.size) * max(tokens * self.rounded_width, self.rounded_weight)

    def gathered(self, blocks: Iterable[BlockParameters]) -> int:
        """Return the bytes of the gathered weights of ``blocks`` and of all modules outside of blocks."""
        return sum(part.gathered(self.size) for part in (self.weights.root, *blocks))

    @cached_property
    def groups(self) -> list[range]:
        """The numbers of the blocks that are gathered together. MTP layers are in their own groups."""
        main, number = len(self.blocks) - self.num_mtp_layers, len(self.blocks)
        grouped = (*self.layout.groups(range(main)), *self.layout.groups(range(main, number)))
        return [range(each[0], each[-1] + 1) for each in grouped]

    def group(self, number: int) -> range:
        """Return the numbers of the blocks that are gathered together with block ``number``."""
        return next(group for group in self.groups if number in group)

    def parts_of(self, group: range) -> Sequence[BlockParameters]:
        return self.weights.blocks[group.start : group.stop]

    def sent(self, *parts: BlockParameters) -> int:
        """Return the bytes of the all-gather buffers from which FSDP2 copies the weights of ``parts``.

        Experts that ep ranks split are left out: they have a buffer of their own (``ep_sent``).
        """
        each = (part.gathered(self.size) - part.ep_gathered(self.size) for part in parts)
        return sum(each) if self.shards > 1 else 0

    def ep_sent(self, part: BlockParameters) -> int:
        """Return the bytes of the all-gather buffer of the experts that ep ranks split."""
        return part.ep_gathered(self.size) if self.shards > self.layout.ep else 0

    def saved(self, num_blocks: int, resident: int) -> int:
        """Return the bytes of activations of the first ``num_blocks`` blocks on the device.

        If activations are offloaded, only those of the last ``resident`` blocks are there: those of the
        current block and, in the backward pass, those of the preceding block, which are copied back at the
        same time.
        """
        first = max(num_blocks - resident, 0) if self.offloads_activations else 0
        return sum(self.saved_by_block[first:num_blocks])

    @cached_property
    def saved_by_block(self) -> list[int]:
        return [block.saved(self.tokens) for block in self.blocks]

    @property
    def final_norm(self) -> int:
        """Bytes that the last norm saves."""
        return self.tokens * self.hidden * self.blocks[-1].norm

    def reduced(self, trained: int, ep: int = 1) -> int:
        """Return the bytes of ``trained`` gradients that exist during their reduction only.

        On one rank, they are the gradients after it, unless these are in host memory or are added to others.
        ``ep`` is the number of ranks that split these parameters, each with gradients of its own.
        """
        one_rank = self.shards * self.layout.dp_replicate == ep
        return 0 if one_rank and not (self.offloads or self.adds_reduced) else trained * FP32

    def ep_reduced(self, block: BlockParameters) -> int:
        """Return ``reduced`` of a block's experts that ep ranks split."""
        return self.reduced(block.ep_trained, self.layout.ep)

    def accumulated_grads(
        self, parts: Iterable[BlockParameters], reduced_experts: Iterable[BlockParameters] = ()
    ) -> int:
        """Return the bytes of unsharded fp32 gradients of ``parts`` accumulated by earlier micro-batches.

        The gradients of the experts of ``reduced_experts``, some of the parts, have been reduced since.
        """
        reduced = sum(part.ep_trained for part in reduced_experts)
        return (sum(part.trained for part in parts) - reduced) * FP32 if self.accumulates else 0

    def sharded_grads(self, first: int) -> int:
        """Return the bytes of the gradient shards of the blocks from ``first`` on, which have been reduced.

        If earlier micro-batches were reduced, there are shards of all gradients. Replicas keep the buffers of
        their all-reduces until the end of the backward pass, even if these were added to such shards or
        copied to host memory.
        """
        blocks = sum(part.unsharded_trained for part in self.weights.blocks[first:])
        everything = sum(part.unsharded_trained for part in self.weights.parts)
        held = 0 if self.offloads else everything if self.adds_reduced else blocks
        if self.layout.dp_replicate > 1 and (self.offloads or self.adds_reduced):
            held += blocks
        return held * FP32 // self.shards

    def ep_sharded_grads(self, parts: Iterable[BlockParameters]) -> int:
        """Return the bytes of the gradient shards of experts of ``parts`` that are reduced before others."""
        if (self.offloads or self.adds_reduced) and self.layout.dp_replicate == 1:
            return 0
        return sum(part.ep_unsharded_trained for part in parts) * FP32 // self.shards

    def divides(self, ep: int = 1) -> bool:
        """Whether FSDP2 makes a quotient of the reduction buffer: for replicas that are not sharded.

        ``ep`` is the number of ranks that split these parameters.
        """
        return self.shards == ep and self.layout.dp_replicate > 1

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of earlier micro-batches exist unsharded, in fp32."""
        return self.num_microbatches > 1 and self.layout.reduce_gradients == "last"

    @property
    def adds_reduced(self) -> bool:
        """Whether the gradients of earlier micro-batches have been reduced."""
        return self.num_microbatches > 1 and self.layout.reduce_gradients == "every"

    @property
    def hidden(self) -> int:
        return self.blocks[0].hidden

    @property
    def run(self) -> RunShape:
        return self.blocks[0].run

    @property
    def size(self) -> int:
        return self.run.size
