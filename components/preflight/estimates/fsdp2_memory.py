"""What a rank of FSDP2 holds at the peak of a train step, from the shapes of the model alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.parallelize import decoder_blocks
from components.engines.shared.microbatch_merging import MAX_TOKENS, largest_number
from components.models.attention_shape import attention_shape
from components.optimizers import Optimizer
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    Bytes,
    RunShape,
    add_by_name,
    head_activations,
    mask_bytes,
    mlp_activations,
    peak,
)
from components.preflight.estimates.model_shape import (
    intermediate_size,
    moe_activations,
    moe_block_numbers,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.parameter_counts import Cuts, Parameter, parameters
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory


@dataclass(frozen=True)
class BlockParameters:
    """Parameters of a block, or of all that is in none, in elements."""

    numel: int
    """Trained or not, of one tensor-parallel rank with its own experts, before they are sharded."""
    trained: int
    unsharded: int
    """What the ranks that shard parameters hold of it together: the experts of all of them."""
    unsharded_trained: int


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of a model."""

    blocks: tuple[BlockParameters, ...]
    root: BlockParameters
    """Embedding, last norm and head."""
    embedding: int
    """Of the embedding, if it is trained."""
    head: int
    """Of the head, tied or not, if it is trained."""

    @property
    def parts(self) -> tuple[BlockParameters, ...]:
        return (*self.blocks, self.root)

    @property
    def trained(self) -> int:
        return sum(part.trained for part in self.parts)

    @property
    def unsharded_trained(self) -> int:
        return sum(part.unsharded_trained for part in self.parts)

    @property
    def unsharded_frozen(self) -> int:
        return sum(part.unsharded for part in self.parts) - self.unsharded_trained


def memory(
    layout: FSDP2Layout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """Of the one pipeline stage that there is."""
    run = RunShape(step.dtype, step.device, layout.activation_checkpointing)
    tokens = step.microbatch.rows * -(-step.microbatch.length // layout.cp)
    held = StepMemory(
        weights=count_parameters(model, layout, step.adapter),
        blocks=block_activations(model, layout, run, step.microbatch, step.adapter),
        vocabulary=-(-model.config.vocab_size // layout.tp),
        shards=step.world_size // (layout.dp_replicate * layout.tp),
        reshards=layout.reshard_after_forward,
        offloads=layout.cpu_offload and step.device == "cuda",
        num_microbatches=step.microbatch.num_microbatches,
        tokens=tokens,
        labels=min(step.microbatch.labels, tokens),
    )
    resting = held.between_steps(len(optimizer.moments))
    asked = list(held.moments())
    if step.reference == "frozen":
        other = count_parameters(step.reference_model or model, layout)
        resting["reference"] = (other.unsharded_trained + other.unsharded_frozen) * run.size // held.shards
        asked.append(held.during_reference(other))
    elif step.reference == "adapter_off" or step.loss.kind == "unpaired":
        asked.append(held.during_reference(held.weights))
    parts = peak(add_by_name(resting, moment) for moment in asked)
    if not held.offloads:
        return [RankMemory(0, parts)]
    host: Bytes = {name: parts.pop(name) for name in ("weights", "moments", "reference") if name in parts}
    return [RankMemory(0, parts, host | {"gradients": held.weights.unsharded_trained * FP32 // held.shards})]


@dataclass(frozen=True)
class StepMemory:
    """A train step of one rank: what it holds at the moments that can be its peak.

    They are those of the last micro-batch, whose backward pass reduces the gradients, block by block. The
    gradients of the ones before it have added up in fp32, whole and not sharded.
    """

    weights: ModelParameters
    blocks: tuple[BlockActivations, ...]
    vocabulary: int
    """Rows of the head."""
    shards: int
    """Ranks that share every parameter."""
    reshards: bool
    offloads: bool
    """To host memory, from a GPU."""
    num_microbatches: int
    tokens: int
    """Of this rank's share of a micro-batch."""
    labels: int
    """In it: at most all there are, as a rank of cp may have the end of every sequence."""

    def between_steps(self, num_moments: int) -> Bytes:
        """Between two steps: shards, trained ones in fp32."""
        trained = self.weights.unsharded_trained * FP32
        return {
            "weights": (trained + self.weights.unsharded_frozen * self.size) // self.shards,
            "moments": trained * num_moments // self.shards,
        }

    def moments(self) -> Iterator[Bytes]:
        yield self.during_head()
        yield from (self.during_block(number) for number in range(len(self.blocks)))
        yield self.during_embedding()
        yield self.during_root_reduction()

    def during_head(self) -> Bytes:
        """After the last block, of which what was sent of its weights is still there."""
        kept = () if self.reshards else self.weights.blocks
        gradients = self.accumulated_grads(self.weights.parts) + self.weights.head * FP32
        return add_by_name(
            head_activations(self.labels, self.hidden, self.vocabulary, self.run),
            {
                "gathered": self.gathered(kept) + self.sent(len(self.blocks) - 1),
                "activations": self.saved(len(self.blocks))
                + self.final_norm
                + self.tokens * self.hidden * self.size,
                "gradients": gradients,
            },
        )

    def during_block(self, number: int) -> Bytes:
        """In its backward pass, with the weights of the block before it on their way: gloo copies them.

        The gradients of all blocks after it are reduced; those of the next one are just being sent.
        """
        blocks, own = self.weights.blocks, self.weights.blocks[number]
        last = number == len(blocks) - 1
        kept = blocks[number if self.reshards else 0 : number + 1]
        coming = self.sent(number - 1) * (2 if self.run.device == "cpu" else 1) if number else 0
        return {
            "gathered": self.gathered(kept) + (coming if self.reshards else 0),
            "activations": self.saved(number + 1)
            + (self.final_norm if last else 0)
            + self.blocks[number].backward(self.tokens),
            "gradients": self.sharded_grads(number + 1)
            + self.accumulated_grads((self.weights.root, *blocks[: number + 1]))
            + (self.weights.head + own.trained) * self.size,
            "buffers": 0 if last else blocks[number + 1].trained * FP32,
        }

    def during_embedding(self) -> Bytes:
        """When its gradient is made, a whole matrix."""
        new = (self.weights.head + self.weights.embedding) * self.size
        return {
            "gathered": self.gathered(()),
            "gradients": self.sharded_grads(0) + self.accumulated_grads([self.weights.root]) + new,
            "buffers": self.weights.blocks[0].trained * FP32,
        }

    def during_root_reduction(self) -> Bytes:
        """A rank alone divides a copy of the gradients by 1."""
        root = self.weights.root.trained * FP32
        return {
            "gradients": self.sharded_grads(0) + root // self.shards,
            "buffers": root * (2 if self.shards == 1 else 1),
        }

    def during_reference(self, weights: ModelParameters) -> Bytes:
        """While ``weights`` say how likely the labels of some micro-batches are; nothing is kept."""
        joined = largest_number([self.tokens] * self.num_microbatches, MAX_TOKENS[self.run.device])
        chunks = head_activations(joined * self.labels, self.hidden, self.vocabulary, self.run)
        block = max(part.numel for part in weights.blocks)
        sent = block * self.size if self.shards > 1 else 0
        forward = max(block.forward(joined * self.tokens) for block in set(self.blocks))
        return {
            "gathered": (weights.root.numel + block) * self.size + sent,
            "activations": max(forward, chunks["activations"]),
            "logits": chunks["logits"],
        }

    def gathered(self, blocks: Iterable[BlockParameters]) -> int:
        """Whole weights of these, and of what lies outside of blocks."""
        return (self.weights.root.numel + sum(part.numel for part in blocks)) * self.size

    def sent(self, number: int) -> int:
        """A block's weights as its ranks send them to each other, from where they are copied."""
        return self.weights.blocks[number].numel * self.size if self.shards > 1 else 0

    def saved(self, num_blocks: int) -> int:
        """Activations of so many blocks."""
        return sum(self.saved_by_block[:num_blocks])

    @cached_property
    def saved_by_block(self) -> list[int]:
        return [block.saved(self.tokens) for block in self.blocks]

    @property
    def final_norm(self) -> int:
        """What the last norm keeps."""
        return self.tokens * self.hidden * self.blocks[-1].norm

    def accumulated_grads(self, parts: Iterable[BlockParameters]) -> int:
        """Bytes of the gradients of ``parts`` that micro-batches before this one have left."""
        return sum(part.trained for part in parts) * FP32 if self.num_microbatches > 1 else 0

    def sharded_grads(self, first: int) -> int:
        """Bytes of the shards of the gradients of the blocks from ``first`` on."""
        trained = sum(part.unsharded_trained for part in self.weights.blocks[first:])
        return 0 if self.offloads else trained * FP32 // self.shards

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
    model: PreTrainedModel, layout: FSDP2Layout, adapter: LoRA | None = None
) -> ModelParameters:
    """Counts the parameters of one tensor-parallel rank."""
    every = decoder_blocks(model)
    names = {id(module): f"{name}." for name, module in model.named_modules()}
    numbers = {names[id(block)]: number for number, block in enumerate(every)}
    found: list[list[Parameter]] = [[] for _ in range(len(every) + 1)]
    for parameter in parameters(model, Cuts(layout.tp, layout.ep, layout.tp), adapter):
        inside = (number for name, number in numbers.items() if parameter.name.startswith(name))
        found[next(inside, len(every))].append(parameter)
    *inner, root = (count_block(each, layout.ep) for each in found)
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    embedding, last = (
        -(-end.numel() // layout.tp) if adapter is None and end.requires_grad else 0 for end in ends
    )
    return ModelParameters(tuple(inner), root, embedding, last)


def count_block(found: Sequence[Parameter], ep: int) -> BlockParameters:
    trained = [p for p in found if p.trained]
    return BlockParameters(
        sum(p.numel for p in found),
        sum(p.numel for p in trained),
        sum(p.numel * (ep if p.of_experts else 1) for p in found),
        sum(p.numel * (ep if p.of_experts else 1) for p in trained),
    )


def block_activations(
    model: PreTrainedModel,
    layout: FSDP2Layout,
    run: RunShape,
    workload: MicrobatchShape,
    adapter: LoRA | None,
) -> tuple[BlockActivations, ...]:
    """In the order of the model; those with experts are alike, and so are the others."""
    config, of = model.config.get_text_config(), attention_shape(model.config)
    number, groups = of.number // layout.tp, of.shared // layout.tp
    query, key, value = number * of.key, groups * of.key, groups * of.value
    repeats = layout.cp // gcd(groups, layout.cp)  # of key-value heads that cp ranks cannot share out
    plain = BlockActivations(
        run,
        hidden=config.hidden_size,
        norms=norms_of_hidden(model),
        norm=FP32 + (run.size if adapter is None else 0),
        normed_heads=query + key if norms_heads(model) else 0,
        attended=query + (key + value) * repeats,
        result=number * of.value,
        heads=number,
        mlp=mlp_activations(intermediate_size(config) // layout.tp),
        latent=of.latent,
        masks=workload.rows * mask_bytes(workload.length, run),
    )
    if not (routed := moe_block_numbers(model)):
        return (plain,) * len(decoder_blocks(model))
    other = replace(plain, mlp=moe_activations(model, run, split=layout.tp, shared_split=layout.tp))
    return tuple(other if n in routed else plain for n in range(len(decoder_blocks(model))))
