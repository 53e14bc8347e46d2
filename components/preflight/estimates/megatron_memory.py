"""Peak memory of a Megatron rank, built and in a train step, estimated from the shapes of the model.

Megatron itself is not imported.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from components.engines.megatron import float8, pipeline_split
from components.engines.megatron.checks import updates_whole_weights
from components.engines.megatron.layout import Layout
from components.engines.shared.recomputation import recomputed_modules
from components.models.scalar_head import output_head
from components.optimizers import Optimizer, state_bytes
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    Bytes,
    RunShape,
    add_by_name,
    head_activations,
    kept_by_head,
    peak,
)
from components.preflight.estimates.megatron_activations import block_activations, stage_blocks
from components.preflight.estimates.megatron_parameters import (
    RankParameters,
    count_parameters,
    stage_layers,
    stage_parameters,
)
from components.preflight.estimates.model_shape import (
    attention_dropout,
)
from components.preflight.estimates.parameter_counts import ParallelSizes, owned_state
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory


def memory(
    layout: Layout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """Estimate the peak memory of a rank of each pipeline stage."""
    how = layout.activation_checkpointing
    modules, drops = recomputed_modules(how, layout.recompute_modules), attention_dropout(model) > 0
    packed = step.packed or step.microbatch.rows == 1  # one padded row is computed as a packed one
    run = RunShape(step.dtype, step.device, how, modules, packed=packed, drops_weights=drops)
    blocks = block_activations(model, layout, run, step.microbatch, step.adapter)
    shards, whole = OptimizerShards.of(layout, step.world_size), updates_whole_weights(optimizer)
    sharing = shards.plain * layout.tp, shards.experts * layout.etp
    if whole:  # without Megatron's distributed optimizer
        layout, shards = replace(layout, distributed_optimizer=False), OptimizerShards(1, 1)
    asks = step.reference != "none" or step.loss.kind == "unpaired"
    found = []
    layers, vocabulary = stage_layers(layout, model), -(-output_head(model).out_features // layout.tp)
    for number, chunks in enumerate(pipeline_split.chunk_layers(layout, model.config.num_hidden_layers)):
        weights = count_parameters(model, layout, "".join(chunks), layers[number], step.adapter)
        own = stage_blocks([blocks[layer] for layer in layers[number]], chunks, layout) or (blocks[0],)
        stage = StageMemory(number, chunks, weights, own, vocabulary, layout, shards, step.microbatch)
        resting, built = stage.between_steps(state_bytes(optimizer)), list(stage.while_built())
        copies = float8.COPIES if step.float8 else 0
        resting["weights"] += copies * weights.in_layers
        if step.reference == "frozen":
            other = step.reference_model or model
            theirs = pipeline_split.chunk_layers(layout, other.config.num_hidden_layers)[number]
            weighed = count_parameters(
                other, layout, "".join(theirs), stage_layers(layout, other)[number], None
            )
            held = (weighed.trained + weighed.frozen) * run.size + copies * weighed.in_layers
            reference = {"reference": held}
            resting, built = resting | reference, [moment | reference for moment in built]
        asked = [*stage.moments(), *([stage.during_reference()] if asks else [])]
        if getattr(step.loss, "sync_reference_every", 0):
            asked.append(stage.during_sync())
        if whole:
            sizes = ParallelSizes(ep=layout.ep)
            inner, ends = stage_parameters(model, sizes, "".join(chunks), layers[number], step.adapter)
            owned = owned_state(optimizer, [*inner, *ends], *sharing)
            resting |= {"masters": owned.weights, "moments": owned.moments}
            gathered = owned.weights if layout.tp > 1 else 0
            asked.append({"gathered": gathered, "buffers": owned.buffers})
        host: Bytes = {}
        if layout.optimizer_cpu_offload:
            host = stage.offloaded(resting.pop("moments"))
        if step.weight_copies:
            on_device = whole or (layout.distributed_optimizer and not layout.optimizer_cpu_offload)
            place = resting if on_device or step.device == "cpu" else host
            written = owned.weights if whole else stage.written_bytes(step.world_size)
            place["averages"] = step.weight_copies * written
        if stage.offloads_activations:
            host["activations"] = stage.in_flight * stage.saved_by_layers
        moments = [*(add_by_name(resting, moment) for moment in asked), *built]
        found.append(RankMemory(number, peak(moments), host))
    return found


@dataclass(frozen=True)
class OptimizerShards:
    """Numbers of ranks that shard the optimizer state of expert and of other parameters."""

    plain: int
    experts: int

    @classmethod
    def of(cls, layout: Layout, world_size: int) -> "OptimizerShards":
        if not layout.distributed_optimizer:
            return cls(1, 1)
        ranks = world_size // layout.pp
        return cls(ranks // layout.tp, ranks // (layout.etp * layout.ep))


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one pipeline stage at the moments that can be its peak."""

    number: int
    chunks: list[str]
    """Contents of each model chunk, in the letters of ``pipeline_split.chunk_layers``."""
    weights: RankParameters
    blocks: tuple[BlockActivations, ...]
    """Layers of the stage, or one layer of another stage if the stage has none."""
    vocabulary: int
    """Number of rows of the head on this rank."""
    layout: Layout
    shards: OptimizerShards
    workload: MicrobatchShape

    def between_steps(self, moments: float) -> Bytes:
        """Return the bytes that a rank holds between two steps, by use.

        Gradients have a permanent fp32 buffer. Weights in fp32 have no separate master weights. ``moments``
        is the number of bytes of optimizer state per trained element.
        """
        trained = self.weights.trained
        return {
            "weights": self.weights.num_bytes(self.size),
            "gradients": trained * FP32,
            "masters": 0 if self.size == FP32 else self.optimizer_shard,
            "moments": int(self.optimizer_shard * moments / FP32),
        }

    def while_built(self) -> Iterator[Bytes]:
        """Yield the memory during construction, in bytes by use, after each buffer of the last model chunk.

        The buffer of the dense parameters is allocated first, then that of the experts. The distributed
        optimizer moves parameters into a buffer. Their old memory is freed only after that buffer and the
        buffer of their gradients have been allocated. There is no optimizer state yet. Without the
        distributed optimizer, nothing is yielded.
        """
        if not self.layout.distributed_optimizer:
            return
        trained, number = self.weights.trained, len(self.chunks)
        ends = self.weights.embedding if {"E", "L"} & set(self.chunks[-1]) else 0
        experts = self.weights.trained_experts // number
        dense = (trained - self.weights.embedding) // number + ends - experts
        weights = self.weights.num_bytes(self.size)
        for moved, missing in ((dense, experts), (experts, 0)):
            gradients = (trained - missing) * FP32
            yield {"weights": weights, "gradients": gradients, "buffers": moved * self.size}

    def offloaded(self, moments: int) -> Bytes:
        """Return the bytes in host memory with ``optimizer_cpu_offload``.

        Megatron updates copies of the master weights there, with copies of their gradients. The master
        weights themselves stay on the GPU.
        """
        return {"masters": self.optimizer_shard, "moments": moments, "gradients": self.optimizer_shard}

    @property
    def optimizer_shard(self) -> int:
        """Bytes in fp32 of the parameters that this rank updates."""
        trained, experts = self.weights.trained, self.weights.trained_experts
        return (trained - experts) * FP32 // self.shards.plain + experts * FP32 // self.shards.experts

    def written_bytes(self, world_size: int) -> int:
        """Return the fp32 bytes of the weights that this rank writes to a checkpoint.

        Without the distributed optimizer, the weights are dealt out to the ranks that hold the same ones.
        """
        layout = replace(self.layout, distributed_optimizer=True)
        return replace(self, shards=OptimizerShards.of(layout, world_size)).optimizer_shard

    def moments(self) -> Iterator[Bytes]:
        """Yield the bytes, in addition to those between steps, at the moments that can be the peak."""
        if self.holds("L"):
            yield self.during_head()
        yield from self.during_layers()
        if any(block.kind == "moe" for block in self.blocks):
            yield self.during_experts()
        if self.holds("E"):
            yield self.during_embedding()
        if self.blocks[0].run.device == "cpu" and self.shards.plain > 1:
            # Gloo gathers the updated weights into a copy.
            yield {"buffers": self.weights.trained * self.size}

    def during_head(self) -> Bytes:
        """Return the bytes after the last layer of a micro-batch."""
        return add_by_name(
            self.head_activations(trained=self.weights.embedding > 0),
            {
                "activations": self.on_device(self.in_flight, layers=1),
                "gradients": self.weights.embedding * FP32,
            },
            *[self.kept_by_head] * self.num_mtp_layers,
        )

    @property
    def num_mtp_layers(self) -> int:
        return sum(block.is_mtp for block in self.blocks)

    @property
    def kept_by_head(self) -> Bytes:
        return kept_by_head(self.labels, self.hidden * self.size, self.weights.embedding)

    def during_layers(self) -> Iterator[Bytes]:
        """Yield the bytes of each layer's backward pass, in addition to those between steps.

        The gradient of the largest matrix exists besides the permanent fp32 gradient buffer. Activations of
        later layers of the same micro-batch have been freed, and so have those of the last norm and the head,
        except in MTP layers: the head of the last layer and those of earlier MTP layers, which were computed
        before an MTP layer, are still to come. Until then, the gradients of the head from later ones wait.
        """
        freed, pending = 0, self.num_mtp_layers
        for block in reversed(self.blocks):
            held = self.on_device(self.in_flight, layers=2) - freed - (0 if pending else self.saved_by_end)
            own = {
                "activations": held + block.backward(self.tokens),
                "gradients": self.weights.matrix * self.size
                + max(self.between_microbatches, self.waiting_grads(pending)),
            }
            yield add_by_name(own, *[self.kept_by_head] * pending)
            if block.kind == "moe":
                again = block.backward_of_experts(self.tokens, self.weights.experts_of_a_layer)
                late = {
                    "activations": held + again,
                    "gradients": self.between_microbatches,
                }
                yield add_by_name(late, *[self.kept_by_head] * pending)
            if block.is_mtp:  # the head before this layer
                waiting = self.waiting_grads(pending) + self.weights.embedding * self.size
                earlier = {"activations": held - block.saved(self.tokens), "gradients": waiting}
                yield add_by_name(earlier, *[self.kept_by_head] * pending)
            freed, pending = freed + block.saved(self.tokens), max(pending - 1, 0)

    def waiting_grads(self, pending: int) -> int:
        """Return the bytes of gradients of the head and the embedding from later MTP layers.

        ``pending`` is the number of heads that come before. The gradient of a tied embedding is added to that
        of the head.
        """
        from_embedding = pending < self.num_mtp_layers and not self.weights.tied
        matrices = (pending > 0) + from_embedding if self.num_mtp_layers else 0
        return matrices * self.weights.embedding * self.size

    def during_experts(self) -> Bytes:
        """Return the bytes in the last layer with experts in the forward pass, before any backward pass.

        The activations of later layers of the chunk do not exist yet.
        """
        last = max(number for number, block in enumerate(self.blocks) if block.kind == "moe")
        missing = sum(block.saved(self.tokens) for block in self.blocks[last:])
        return {
            "activations": self.on_device(self.in_flight, layers=1)
            - self.saved_by_end
            - missing
            + self.blocks[last].moe_forward_peak(self.tokens),
            "gradients": self.between_microbatches,
        }

    def during_embedding(self) -> Bytes:
        """Return the bytes when the gradient of the embedding, one full matrix, is computed.

        The activations of other micro-batches exist at the same time.
        """
        return {
            "activations": self.on_device(self.in_flight - 1, layers=0)
            + self.tokens * self.hidden * self.size,
            "gradients": self.weights.embedding * self.size + self.between_microbatches,
        }

    @property
    def between_microbatches(self) -> int:
        """Bytes of the gradient of a tied head, until the gradient of the embedding is added to it."""
        together = self.weights.tied and self.holds("E") and self.holds("L")
        return self.weights.embedding * self.size if together else 0

    @property
    def in_flight(self) -> int:
        """Largest number of chunk activations that await their backward pass.

        With 1F1B, a stage runs as many forward passes as there are later stages before its first backward
        pass. The interleaved schedule runs twice as many, plus ``pp`` micro-batches of all chunks except the
        last.
        """
        pp, vpp, behind = self.layout.pp, self.layout.vpp, self.layout.pp - self.number - 1
        number = self.workload.num_microbatches
        if vpp == 1:
            return min(behind + 1, number)
        return min(2 * behind + (vpp - 1) * pp + 1, -(-number // pp) * pp * vpp)

    def on_device(self, number: int, layers: int) -> int:
        """Return the bytes of the activations of ``number`` chunks on the device.

        If activations are offloaded, only those of ``layers`` layers are there: those of the current layer
        and, in the backward pass, those of the preceding layer, which are copied back at the same time. If
        several chunks are in flight, the activations of the last layer of the newest one are there, too.
        """
        if not self.offloads_activations:
            return number * self.saved
        layer = max(block.saved(self.tokens) for block in self.blocks)
        return (layers + (self.in_flight > 1)) * layer + number * (self.saved - self.saved_by_layers)

    @property
    def offloads_activations(self) -> bool:
        return self.layout.activation_offloading and self.blocks[0].run.device == "cuda"

    @property
    def saved(self) -> int:
        """Bytes of activations of one chunk for one micro-batch."""
        received = 0 if self.size == FP32 else self.tokens * self.blocks[0].hidden * self.size
        return self.saved_by_layers + received + self.saved_by_end

    @property
    def saved_by_end(self) -> int:
        """Bytes of activations of the last norm and the head."""
        states = self.tokens * self.blocks[0].hidden
        return states * (self.blocks[0].norm + self.size) if self.holds("L") else 0

    @property
    def saved_by_layers(self) -> int:
        layers = sum(b.saved(self.tokens) for b in self.blocks) if self.holds("t") else 0
        return layers // len(self.chunks)

    def during_reference(self) -> Bytes:
        """Return the bytes of a pass without gradient for one micro-batch."""
        logits = self.head_activations(trained=False)["logits"] if self.holds("L") else 0
        tokens = int(self.tokens * (1 + self.workload.no_grad_ratio))
        return {
            "activations": max(block.forward(tokens) for block in set(self.blocks)),
            "logits": logits,
        }

    def during_sync(self) -> Bytes:
        """Return the bytes of the fp32 buffer for the sharded masters of the largest weight.

        When the reference is updated, an all-reduce collects the masters of a weight in it.
        """
        whole = max(self.weights.embedding, self.weights.matrix) * self.layout.distributed_optimizer
        return {"buffers": whole * FP32}

    def head_activations(self, *, trained: bool) -> Bytes:
        run = self.blocks[0].run
        return head_activations(self.labels, self.hidden, self.vocabulary, run, trained=trained)

    def holds(self, what: str) -> bool:
        return any(what in chunk for chunk in self.chunks)

    @property
    def hidden(self) -> int:
        return self.blocks[0].hidden * (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch on this rank."""
        return self.workload.rows * -(-self.workload.length // self.layout.cp)

    @property
    def labels(self) -> int:
        """Maximum number of labels on this rank: a cp rank may have the end of every sequence."""
        return min(self.workload.labels, self.tokens)

    @property
    def size(self) -> int:
        return self.blocks[0].run.size
