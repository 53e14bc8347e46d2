"""Peak memory of an FSDP2 rank in a train step, estimated from the shapes of the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from components.engines.fsdp2.float8 import float8_linears
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.shared.microbatch_merging import MAX_TOKENS, largest_number
from components.engines.shared.recomputation import recomputed_modules
from components.models.experts import number_of_experts
from components.models.scalar_head import output_head
from components.optimizers import Optimizer, TorchClass, needs_whole_weights, state_bytes
from components.preflight.estimates.activation_memory import (
    FP32,
    Bytes,
    RunShape,
    add_by_name,
    head_activations,
    kept_by_head,
    peak,
)
from components.preflight.estimates.fsdp2_activations import block_activations
from components.preflight.estimates.fsdp2_parameters import ModelParameters, count_parameters
from components.preflight.estimates.fsdp2_quantities import RankQuantities
from components.preflight.estimates.model_shape import (
    attention_dropout,
)
from components.preflight.estimates.parameter_counts import ParallelSizes, owned_state, parameters
from components.preflight.estimates.quantities import MemoryInputs, RankMemory


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
class StepMemory(RankQuantities):
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
