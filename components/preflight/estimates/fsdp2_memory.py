"""Peak memory of an FSDP2 rank in a train step, estimated from the shapes of the model."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.adapters.lora_config import MAGNITUDE, A
from components.engines.fsdp2.float8 import float8_linears
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.parallelize import block_prefixes
from components.engines.shared.microbatch_merging import MAX_TOKENS, largest_number
from components.engines.shared.recomputation import recomputed_modules
from components.engines.shared.ulysses import head_repeats
from components.models.attention_shape import attention_shape
from components.models.experts import number_of_experts
from components.models.mtp import num_mtp_layers
from components.models.nf4 import BLOCK
from components.models.scalar_head import output_head
from components.optimizers import Optimizer, TorchClass, needs_whole_weights, state_bytes
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    Bytes,
    RunShape,
    add_by_name,
    head_activations,
    kept_by_head,
    mask_bytes,
    peak,
)
from components.preflight.estimates.model_shape import (
    attention_dropout,
    dense_mlp,
    dropout_bytes,
    has_layer_norms,
    latent_widths,
    moe_block_numbers,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.moe_activations import fsdp2_moe
from components.preflight.estimates.parameter_counts import ParallelSizes, Parameter, owned_state, parameters
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory

NORM_GRADIENTS = 5
"""Number of fp32 tensors that exist at the same time in the backward pass of a norm of transformers:
gradients of its squares, of their mean and of its products."""

LAST_OF_MLP = ".mlp.down_proj.weight"
"""End of the name of the last matrix of an MLP."""

ROUNDING = 2 * FP32 + 1
"""Bytes per value while it is rounded to float8: two copies in fp32, and the result."""


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


def memory(
    layout: FSDP2Layout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """Estimate the peak memory of a rank; FSDP2 has one pipeline stage."""
    how = layout.activation_checkpointing
    modules = recomputed_modules(how, layout.recompute_modules)
    drops = attention_dropout(model) > 0
    run = RunShape(step.dtype, step.device, how, modules, step.tiled_norms, step.packed, drops)
    tokens = step.microbatch.rows * -(-step.microbatch.length // layout.cp)
    linears = float8_linears(model) if step.float8 else {}
    in_float8 = linears if layout.fp8_all_gather else ()
    shards = step.world_size // (layout.dp_replicate * layout.tp)
    held = StepMemory(
        weights=count_parameters(model, layout, shards, step.adapter, in_float8),
        blocks=block_activations(model, layout, run, step.microbatch, step.adapter),
        vocabulary=-(-output_head(model).out_features // layout.tp),
        shards=shards,
        layout=layout,
        num_microbatches=step.microbatch.num_microbatches,
        offloads=layout.cpu_offload and step.device != "cpu",
        offloads_activations=layout.activation_offloading and step.device != "cpu",
        tokens=tokens,
        labels=min(step.microbatch.labels, tokens),
        rounded_width=max((max(linear.weight.shape) for linear in linears.values()), default=0),
        rounded_weight=max((linear.weight.numel() for linear in linears.values()), default=0),
        no_grad_ratio=step.microbatch.no_grad_ratio,
    )
    resting = held.between_steps(state_bytes(optimizer))
    if step.weight_copies:
        resting["averages"] = step.weight_copies * held.weights.unsharded_trained * FP32 // shards
    asked = list(held.moments())
    gradients = held.weights.unsharded_trained * FP32 // shards
    on_gpu = step.device != "cpu" and not held.offloads
    if isinstance(optimizer, TorchClass) and optimizer.updates_together and on_gpu:
        asked.append({"gradients": gradients, "buffers": gradients})
    if needs_whole_weights(optimizer):
        split = layout.ranks_with_own_experts(number_of_experts(model), shards)
        whole = parameters(model, ParallelSizes(ep=split), step.adapter)
        owned = owned_state(optimizer, whole, step.world_size, shards * layout.tp // split)
        resting["moments"] = owned.moments
        gathered = 2 * (owned.weights - owned.unshared)
        asked.append({"gradients": gradients, "gathered": gathered, "buffers": owned.buffers})
    if step.reference == "frozen":
        another = step.reference_model or model
        other = count_parameters(another, layout, shards, None, float8_linears(another) if in_float8 else ())
        resting["reference"] = (other.unsharded_trained + other.unsharded_frozen) * run.size // shards
        asked.append(held.during_reference(other, gathers=layout.gathers_frozen(shards)))
    elif step.reference == "adapter_off" or step.loss.kind == "unpaired":
        asked.append(held.during_reference(held.weights))
    parts = peak(add_by_name(resting, moment) for moment in asked)
    host: Bytes = {}
    if held.offloads_activations:
        host["activations"] = sum(held.saved_by_block) + held.final_norm
    if held.offloads:
        stays = ("weights", "moments", "averages", "reference")
        host |= {name: parts.pop(name) for name in stays if name in parts}
        host["gradients"] = gradients
    return [RankMemory(0, parts, host)]


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank at the moments of a train step that can be its peak.

    These moments are in the last micro-batch, whose backward pass reduces the gradients block by block.
    Gradients of earlier micro-batches are accumulated in fp32: unsharded, or as shards if they are reduced
    after each micro-batch. In the order of time, the methods and what exists besides ``between_steps`` are

        during_reference         a pass without gradient: a group's weights, temporaries, logits
        during_first_gather      weights of the first group, buffers of two all-gathers, hidden states
        during_forward           of a group of blocks: its weights, prefetched ones, saved activations
        during_experts           of a block in the forward pass: also temporaries of its experts
        during_head              in both passes: all saved activations, logits, the gradient of the head
        during_last_norm         in its backward pass: all saved activations, and temporaries of the norm
        during_block             in the backward pass: recomputed activations and gradients of the block,
                                 prefetched weights, gradients of the next group that are being sent
        during_expert_reduction  gradients of a block's experts, and their reduction buffer
        before_reduction         gradients of a group, and their reduction buffer
        during_reduction         this buffer and its quotient, for replicas that are not sharded
        during_earlier_head      of an MTP layer, after its backward pass: gradients that wait for others
        during_embedding         the full gradient of the embedding, and the first group's being sent
        before_root_reduction    gradients outside of blocks, and their reduction buffer
        during_root_reduction    this buffer, and shards of all gradients
    """

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

    def moments(self) -> Iterator[Bytes]:
        yield self.during_first_gather()
        if self.layout.prefetch_groups is not None:
            yield from (self.during_forward(number) for number in range(len(self.groups)))
        yield self.during_head(passes_back=False)
        yield self.during_head(passes_back=True)
        if not self.num_mtp_layers:  # which begin with norms of their own
            yield self.during_last_norm()
        for number, block in enumerate(self.blocks):
            yield from (self.during_block(number, part) for part in ("mlp", "norm"))
            if block.is_mtp:
                yield self.during_earlier_head(number)
            if block.kind == "moe":
                yield from (self.during_experts(number), self.during_block(number, "experts"))
            if self.weights.blocks[number].ep_trained:
                yield self.during_expert_reduction(number)
        yield from (self.before_reduction(group) for group in self.groups)
        if self.divides():
            yield from (self.during_reduction(group) for group in self.groups)
        yield self.during_embedding()
        yield self.before_root_reduction()
        yield self.during_root_reduction()

    def during_first_gather(self) -> Bytes:
        """Return the bytes when the weights of the first group of blocks have just been gathered.

        FSDP2 copies the weights from the buffer of the all-gather. Two such buffers exist: that of the
        group, and that of the embedding, the last norm and the head, which is freed when the group begins.
        """
        root, first = self.weights.root, self.parts_of(self.group(0))
        separate = sum(part.ep_gathered(self.size) for part in first)
        return {
            "gathered": self.gathered(first) - separate + self.sent(root) + self.sent(*first),
            "activations": self.tokens * self.hidden * self.size,
        }

    def during_forward(self, number: int) -> Bytes:
        """Return the bytes in the forward pass of a group, while weights of later groups are prefetched.

        The buffer of the group's own all-gather is freed by the next group.
        """
        group, ahead = self.groups[number], self.layout.prefetch_groups or 0
        kept = self.parts_of(range(group.start if self.layout.reshard_after_forward else 0, group.stop))
        coming = self.groups[number : number + 1 + ahead]
        last = self.blocks[group.stop - 1]
        return {
            "gathered": self.gathered(kept) + sum(self.sent(*self.parts_of(each)) for each in coming),
            "activations": self.saved(group.stop, resident=1) + last.forward(self.tokens),
            "dequantized": max(part.dequantized_bytes(self.size) for part in self.parts_of(group)),
            "gradients": self.accumulated_grads(self.weights.parts) + self.sharded_grads(len(self.blocks)),
        }

    def during_head(self, *, passes_back: bool) -> Bytes:
        """Return the bytes in the output head: in the forward pass, or in the backward pass.

        This includes an all-gather buffer of the last group of blocks: in the forward pass, that of this
        pass; in the backward pass, that for the blocks' backward pass, if the weights were not kept. The
        result of the last norm is freed after the forward pass.
        """
        reshards = self.layout.reshard_after_forward
        kept, last = () if reshards else self.weights.blocks, self.parts_of(self.groups[-1])
        received = self.sent(*last) if passes_back else self.ep_sent(last[-1]) or self.sent(*last)
        gradients = self.accumulated_grads(self.weights.parts) + self.weights.head * FP32
        gradients += self.sharded_grads(len(self.blocks))
        sizes = self.labels, self.hidden, self.vocabulary
        head = head_activations(*sizes, self.run, trained=self.weights.head > 0, ends=passes_back)
        result = 0 if passes_back else self.tokens * self.hidden * self.size
        own = {
            "gathered": self.gathered(kept) + (received if reshards or not passes_back else 0),
            "activations": self.saved(len(self.blocks), resident=1) + self.final_norm + result,
            "gradients": gradients,
        }
        return add_by_name(head, own, *[self.kept_by_head] * self.num_mtp_layers)

    def during_last_norm(self) -> Bytes:
        """Return the bytes in the backward pass of the last norm, whose product has been freed."""
        last, reshards = self.blocks[-1], self.layout.reshard_after_forward
        own = last.norm_input + last.norm_gradients
        gradients = self.accumulated_grads(self.weights.parts) + self.sharded_grads(len(self.blocks))
        return {
            "gathered": self.gathered(() if reshards else self.weights.blocks)
            + (self.sent(*self.parts_of(self.groups[-1])) if reshards else 0),
            "activations": self.saved(len(self.blocks), resident=1) + self.tokens * self.hidden * own,
            "gradients": gradients + self.weights.head * self.size,
        }

    @property
    def num_mtp_layers(self) -> int:
        """Number of the last blocks, which predict a later token each, with the head once more."""
        return sum(block.is_mtp for block in self.blocks)

    @property
    def kept_by_head(self) -> Bytes:
        return kept_by_head(self.labels, self.hidden * self.size, self.weights.head)

    def during_experts(self, number: int) -> Bytes:
        """Return the bytes in the forward pass of the experts of a block.

        The buffer of the last all-gather exists until the next one: that of experts that ep ranks split.
        """
        group, own = self.group(number), self.weights.blocks[number]
        first = group.start if self.layout.reshard_after_forward else 0
        kept = self.weights.blocks[first : group.stop]
        later = sum(part.ep_gathered(self.size) for part in kept[number + 1 - first :])
        return {
            "gathered": self.gathered(kept) - later + (self.ep_sent(own) or self.sent(*self.parts_of(group))),
            "activations": self.saved(number, resident=0) + self.blocks[number].moe_forward_peak(self.tokens),
            "gradients": self.accumulated_grads(self.weights.parts) + self.sharded_grads(len(self.blocks)),
        }

    def during_block(self, number: int, part: Literal["mlp", "experts", "norm"]) -> Bytes:
        """Return the bytes in the backward pass of a block, while weights of previous groups are prefetched.

        Gloo copies these weights. The gradients of all later groups have been reduced, except those of the
        next group, which are being sent. The gradients of the block's own group are reduced together.
        ``part`` is ``mlp`` while the gradients of the MLP's activations exist, and those of the matrices
        before its last one do not exist yet, ``experts`` when the gradients of expert matrices exist, and
        ``norm`` in the norm before the MLP.
        """
        blocks, own, group = self.weights.blocks, self.weights.blocks[number], self.group(number)
        end, block = group.stop, self.blocks[number]
        # Before an MTP layer's own head, the heads of the last block and of earlier MTP layers were computed.
        pending = max(number + 1 - (len(blocks) - self.num_mtp_layers), 0)
        activations = {
            "mlp": lambda: block.backward_of_mlp(self.tokens),
            "experts": lambda: block.backward_of_experts(self.tokens, own.experts),
            "norm": lambda: block.backward_of_norm(self.tokens),
        }[part]()
        trained = sum(each.trained - each.ep_trained for each in blocks[number:end])
        if part != "norm":
            trained -= max(own.before_mlp - own.ep_trained, 0)
        finished = blocks[number + (part != "norm") : end]
        passing = {
            "gathered": self.gathered_backward(number, part),
            "activations": self.saved(number + 1, resident=2) + activations,
            "dequantized": own.dequantized_bytes(self.size),
            "rounded": self.rounded(self.tokens) if part == "mlp" else 0,
            "gradients": self.sharded_grads(end)
            + self.ep_sharded_grads(finished)
            + self.accumulated_grads((self.weights.root, *blocks[:end]), reduced_experts=finished)
            + (self.weights.head + trained) * self.size
            + self.waiting_grads(number + 1),
            "buffers": self.sent_grads(number, part),
        }
        return add_by_name(passing, *[self.kept_by_head] * pending)

    def during_earlier_head(self, number: int) -> Bytes:
        """Return the bytes after the backward pass of an MTP layer, in that of the head before it.

        The gradient of the head, which was computed in the forward pass, is rounded, and is added to that of
        the heads after it. The gradient of the layer is being reduced.
        """
        blocks, group = self.weights.blocks, self.group(number)
        own = {
            "gathered": self.gathered_after(group),
            "activations": self.saved(number, resident=1) + self.final_norm,
            "gradients": self.sharded_grads(number)
            + self.accumulated_grads((self.weights.root, *blocks[:number]))
            + 2 * self.weights.head * self.size
            + self.waiting_grads(number),
            "buffers": self.reduced(self.trained_together(group)),
        }
        pending = number + 1 - (len(blocks) - self.num_mtp_layers)
        return add_by_name(own, *[self.kept_by_head] * pending)

    def waiting_grads(self, number: int) -> int:
        """Return the bytes of the gradient of the embedding from the MTP layers from ``number`` on.

        The gradient of a tied embedding is added to that of the head.
        """
        tied = self.weights.root.trained < self.weights.head + self.weights.embedding
        later = any(block.is_mtp for block in self.blocks[number:])
        return self.weights.embedding * self.size if later and not tied else 0

    def gathered_backward(self, number: int, part: str) -> int:
        """Return the bytes of gathered weights in the backward pass of a block, including prefetched ones.

        Experts that ep ranks split are freed after their own backward pass.
        """
        blocks, group = self.weights.blocks, self.group(number)
        freed = blocks[number + (part != "norm") : group.stop]
        separate = sum(each.ep_gathered(self.size) for each in freed)
        if not self.layout.reshard_after_forward:
            return self.gathered(blocks[: group.stop]) - separate
        return self.gathered(self.parts_of(group)) - separate + self.coming(group)

    def gathered_after(self, group: range) -> int:
        """Return the bytes of gathered weights after a group's backward pass, without those of the group."""
        if not self.layout.reshard_after_forward:
            return self.gathered(self.weights.blocks[: group.start])
        return self.gathered(()) + self.coming(group)

    def coming(self, group: range) -> int:
        """Return the bytes of the all-gather buffers of the groups prefetched in a group's backward pass."""
        before = self.groups[: self.groups.index(group)][-(self.layout.prefetch_groups or 1) :]
        coming = sum(self.sent(*self.parts_of(each)) for each in before)
        return coming * (2 if self.run.device == "cpu" else 1)

    def sent_grads(self, number: int, part: str) -> int:
        """Return the bytes of gradients that are being sent in the backward pass of a block.

        They are those of the next group, or of experts that ep ranks split: the block's own, or those of the
        next block of its group.
        """
        own, end = self.weights.blocks[number], self.group(number).stop
        if own.ep_numel and part == "norm":
            return self.ep_reduced(own)
        if number + 1 < end and self.weights.blocks[number + 1].ep_numel:
            return self.ep_reduced(self.weights.blocks[number + 1])
        if end == len(self.blocks):
            return 0
        return self.reduced(self.trained_together(self.group(end)))

    def trained_together(self, group: range) -> int:
        """Return the number of elements of a group whose gradients are reduced together."""
        return sum(part.trained - part.ep_trained for part in self.parts_of(group))

    def during_expert_reduction(self, number: int) -> Bytes:
        """Return the bytes when the gradients of a block's experts, sharded over ep ranks, are reduced.

        They exist twice: in the reduction buffer, and either as the gradients that were copied to it or as
        the result, which may have to be added to the result of earlier micro-batches.
        """
        own, after = self.weights.blocks[number], self.during_block(number, "norm")
        unreduced = own.ep_trained * (FP32 if self.accumulates else self.size)
        result = own.ep_unsharded_trained * FP32 // self.shards
        if self.divides(self.layout.ep):
            result += own.ep_trained * FP32
        elif not (self.adds_reduced or self.offloads):
            result = 0  # it is counted in ``after``, or is the buffer
        return after | {
            "gradients": after["gradients"] - self.ep_sharded_grads([own]) + max(unreduced, result),
            "buffers": own.ep_trained * FP32,
        }

    def before_reduction(self, group: range) -> Bytes:
        """Return the bytes when the gradients of a group of blocks have been copied to the reduction buffer.

        The weights of the group have been freed.
        """
        parts, first = self.parts_of(group), group.start
        trained = self.trained_together(group)
        blocks = (self.weights.root, *self.weights.blocks[: group.stop])
        earlier = self.accumulated_grads(blocks, reduced_experts=parts)
        return {
            "gathered": self.gathered_after(group),
            "activations": self.saved(first, resident=1) + self.tokens * self.hidden * self.size,
            "gradients": self.sharded_grads(group.stop)
            + self.ep_sharded_grads(parts)
            + (earlier or trained * self.size)
            + self.weights.head * self.size
            + self.waiting_grads(first),
            "buffers": trained * FP32,
        }

    def during_reduction(self, group: range) -> Bytes:
        """Return the bytes when FSDP2 divides the gradients of a group of blocks by 1 (see ``divides``).

        Besides the reduction buffer there is its quotient, and the result, which is among the gradients.
        """
        first = group.start
        earlier = self.accumulated_grads((self.weights.root, *self.weights.blocks[:first]))
        return self.before_reduction(group) | {
            "gradients": self.sharded_grads(first)
            + earlier
            + self.weights.head * self.size
            + self.waiting_grads(first),
            "buffers": 2 * self.trained_together(group) * FP32,
        }

    def during_embedding(self) -> Bytes:
        """Return the bytes when the gradient of the embedding, one full matrix, is computed."""
        new = (self.weights.head + self.weights.embedding) * self.size + self.waiting_grads(0)
        return {
            "gathered": self.gathered(()),
            "gradients": self.sharded_grads(0) + self.accumulated_grads([self.weights.root]) + new,
            "buffers": self.reduced(self.trained_together(self.group(0))),
        }

    def before_root_reduction(self) -> Bytes:
        """Return the bytes when gradients outside of blocks have been copied to the reduction buffer."""
        root = self.weights.root
        return {
            "gradients": self.sharded_grads(0) + (self.accumulated_grads([root]) or root.trained * self.size),
            "buffers": root.trained * FP32,
        }

    def during_root_reduction(self) -> Bytes:
        """Return the bytes when gradients outside of blocks are reduced.

        FSDP2 still refers to the unreduced gradient of the last parameter, which is an untied head.
        """
        root, head = self.weights.root, self.weights.head
        tied = root.trained < head + self.weights.embedding
        last = (
            0 if tied or self.shards == 1 else head * (FP32 if self.accumulated_grads([root]) else self.size)
        )
        return {
            "gradients": self.sharded_grads(0) + root.trained * FP32 // self.shards + last,
            "buffers": self.reduced(root.trained) * (2 if self.divides() else 1),
        }

    def during_reference(self, weights: ModelParameters, *, gathers: bool = True) -> Bytes:
        """Return the bytes of a pass without gradient through ``weights``, which merges micro-batches.

        ``gathers`` is whether FSDP gathers these weights.
        """
        tokens, labels = (int(number * (1 + self.no_grad_ratio)) for number in (self.tokens, self.labels))
        joined = largest_number([tokens] * self.num_microbatches, MAX_TOKENS[self.run.device])
        chunks = head_activations(joined * labels, self.hidden, self.vocabulary, self.run, trained=False)
        groups, ahead = self.layout.groups(weights.blocks), self.layout.prefetch_groups or 0
        sent = [max(self.sent(*group), *map(self.ep_sent, group)) for group in groups]
        largest = max(groups, key=lambda group: sum(block.gathered(self.size) for block in group))
        gathered = sum(part.gathered(self.size) for part in (weights.root, *largest))
        gathered += max(sum(sent[number : number + 1 + ahead]) for number in range(len(sent)))
        forward = max(block.forward(joined * tokens) for block in set(self.blocks))
        return {
            "gathered": gathered if gathers else 0,
            "dequantized": max(part.dequantized_bytes(self.size) for part in weights.blocks),
            "rounded": self.rounded(joined * tokens),
            "activations": max(forward, chunks["activations"]),
            "logits": chunks["logits"],
        }

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


def block_activations(
    model: PreTrainedModel,
    layout: FSDP2Layout,
    run: RunShape,
    workload: MicrobatchShape,
    adapter: LoRA | None,
) -> tuple[BlockActivations, ...]:
    """Return the activation widths of each block, in order.

    All MoE blocks have the same widths, and so have all dense blocks, except for what DoRA saves. Blocks from
    number ``recompute_num_layers`` on are not recomputed.
    """
    config, of = model.config.get_text_config(), attention_shape(model.config)
    number, groups = of.number // layout.tp, of.shared // layout.tp
    query, key, value = number * of.key, groups * of.key, groups * of.value
    repeats = head_repeats(groups, layout.cp)
    both = number * (of.key + of.value) if run.repeats_heads else (key + value) * repeats
    attended, padded = query + both, 0
    if of.latent:
        attended, padded = latent_widths(config, run, number, copies_values=False)
    whole = run.tiled_norms or has_layer_norms(model)
    plain = BlockActivations(
        run,
        hidden=config.hidden_size,
        norms=norms_of_hidden(model),
        norm_input=run.size if whole else FP32,
        norm_product=0 if whole or adapter is not None else run.size,
        norm_gradients=2 * run.size if whole else NORM_GRADIENTS * FP32,
        normed_heads=query + key if norms_heads(model) else 0,
        attended=attended,
        result=number * of.value,
        copied=padded if run.computes_rows_at_once else number * of.value,
        heads=number,
        mlp=dense_mlp(model, layout.tp),
        latent=of.latent,
        masks=(workload.rows if run.packed else 1) * mask_bytes(workload, run, config),
    )
    other, routed = plain, moe_block_numbers(model)
    if routed:
        mlp = fsdp2_moe(model, run, tp=layout.tp, ep=layout.ep)
        other = replace(plain, mlp=mlp, kind="moe")
    if adapter is not None and adapter.dora:
        plain, other = (replace(kind, dora_products=dora_products(model, adapter)) for kind in (plain, other))
    prefixes = block_prefixes(model)
    widths, dropped = dora_widths(model, adapter, prefixes), dropout_bytes(model, adapter, run, prefixes)
    mlps = [f"{prefix}mlp." for prefix in prefixes]
    of_mlps = zip(dora_widths(model, adapter, mlps), dropout_bytes(model, adapter, run, mlps), strict=True)
    blocks = [
        replace(
            other if n in routed else plain,
            dora=widths[n],
            dropout=dropped[n],
            mlp_adapter_bytes=width * run.size + num_bytes,
        )
        for n, (width, num_bytes) in enumerate(of_mlps)
    ]
    main = len(blocks) - num_mtp_layers(model.config)
    blocks = [replace(block, is_mtp=number >= main) for number, block in enumerate(blocks)]
    first = len(blocks) if layout.recompute_num_layers is None else layout.recompute_num_layers
    return (*blocks[:first], *(block.not_recomputed() for block in blocks[first:]))


def dora_products(model: PreTrainedModel, adapter: LoRA) -> int:
    """Return the elements of all matrices from which peft computes the norms of one weight.

    The matrices are the identity, the adapter's output for it, this output scaled, and its sum with the
    weight. The result is the maximum over the weights.
    """
    shapes = adapter.shapes(model)
    sizes = (
        (shapes[name.removesuffix(MAGNITUDE) + A][1], shape.numel())
        for name, shape in shapes.items()
        if name.endswith(MAGNITUDE)
    )
    return max(width * (width + 3 * rows) for width, rows in sizes)


def dora_widths(model: PreTrainedModel, adapter: LoRA | None, prefixes: Sequence[str]) -> list[int]:
    """Return the total width of what DoRA saves in each module of ``prefixes``.

    The gradient of a norm needs two results: that of its matrix, and that of the adapter of the matrix.
    """
    if adapter is None or not adapter.dora:
        return [0] * len(prefixes)
    norms = [
        (name, shape.numel()) for name, shape in adapter.shapes(model).items() if name.endswith(MAGNITUDE)
    ]
    return [2 * sum(size for name, size in norms if name.startswith(prefix)) for prefix in prefixes]
