"""What a rank of FSDP2 holds at the peak of a train step, from the shapes of the model alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.bins import MAX_TOKENS, largest_number
from components.engines.estimate import (
    FP32,
    Block,
    Bytes,
    Run,
    head,
    head_dim,
    intermediate_size,
    largest,
    masks,
    norms_of_a_block,
    parameters,
    together,
)
from components.engines.fsdp2.parallelize import blocks
from components.optimizers import Optimizer
from runner.protocols import RankMemory, TrainStep, Workload

if TYPE_CHECKING:
    from components.engines.fsdp2.spec import FSDP2


@dataclass(frozen=True)
class Weights:
    """Parameters of one tensor-parallel rank, before they are sharded, in elements."""

    block: int
    """Of one block, trained or not; blocks are alike."""
    block_trained: int
    root: int
    """Of what is in no block: embedding, last norm and head."""
    root_trained: int
    embedding: int
    """Of the embedding, if it is trained."""
    head: int
    """Of the head, tied or not, if it is trained."""
    num_blocks: int

    @property
    def trained(self) -> int:
        return self.num_blocks * self.block_trained + self.root_trained

    @property
    def frozen(self) -> int:
        return self.num_blocks * self.block + self.root - self.trained


def memory(
    layout: "FSDP2", model: PreTrainedModel, optimizer: Optimizer, step: TrainStep
) -> list[RankMemory]:
    """Of the one pipeline stage that there is."""
    run = Run(step.dtype, step.device, layout.activation_checkpointing)
    tokens = step.workload.rows * -(-step.workload.length // layout.cp)
    held = Step(
        weights=weigh(model, layout.tp, step.adapter),
        block=block_of(model, layout, run, step.workload, step.adapter),
        vocabulary=-(-model.config.vocab_size // layout.tp),
        shards=step.world_size // (layout.dp_replicate * layout.tp),
        reshards=layout.reshard_after_forward,
        offloads=layout.cpu_offload and step.device == "cuda",
        num_microbatches=step.workload.num_microbatches,
        tokens=tokens,
        labels=min(step.workload.labels, tokens),
    )
    resting = held.resting(len(optimizer.moments))
    asked = list(held.moments())
    if step.reference == "frozen":
        other = weigh(step.reference_model or model, layout.tp)
        resting["reference"] = (other.trained + other.frozen) * run.size // held.shards
        asked.append(held.asking(other))
    elif step.reference == "adapter_off" or step.loss.kind == "unpaired":
        asked.append(held.asking(held.weights))
    parts = largest(together(resting, moment) for moment in asked)
    if not held.offloads:
        return [RankMemory(0, parts)]
    host: Bytes = {name: parts.pop(name) for name in ("weights", "moments", "reference") if name in parts}
    return [RankMemory(0, parts, host | {"gradients": held.weights.trained * FP32 // held.shards})]


@dataclass(frozen=True)
class Step:
    """A train step of one rank: what it holds at the moments that can be its peak.

    They are those of the last micro-batch, whose backward pass reduces the gradients, block by block. The
    gradients of the ones before it have added up in fp32, whole and not sharded.
    """

    weights: Weights
    block: Block
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

    def resting(self, num_moments: int) -> Bytes:
        """Between two steps: shards, trained ones in fp32."""
        trained = self.weights.trained * FP32
        return {
            "weights": (trained + self.weights.frozen * self.size) // self.shards,
            "moments": trained * num_moments // self.shards,
        }

    def moments(self) -> Iterator[Bytes]:
        yield self.in_head()
        yield self.in_last_block()
        yield self.in_first_block()
        yield self.at_embedding()
        yield self.reducing_root()

    def in_head(self) -> Bytes:
        """After the last block, of which what was sent of its weights is still there."""
        kept = 0 if self.reshards else self.weights.num_blocks
        gradients = self.added_up(self.weights.trained) + self.weights.head * FP32
        return together(
            head(self.labels, self.block.hidden, self.vocabulary, self.block.run),
            {
                "gathered": self.gathered(kept) + self.sent,
                "activations": self.saved + self.tokens * self.block.hidden * self.size,
                "gradients": gradients,
            },
        )

    def in_last_block(self) -> Bytes:
        """In its backward pass, with the weights of the block before it on their way: gloo copies them."""
        kept = 1 if self.reshards else self.weights.num_blocks
        coming = self.sent * (2 if self.block.run.device == "cpu" else 1) if self.reshards else 0
        new = (self.weights.head + self.weights.block_trained) * self.size
        return {
            "gathered": self.gathered(kept) + coming,
            "activations": self.saved + self.block.backward(self.tokens),
            "gradients": self.added_up(self.weights.trained) + new,
        }

    def in_first_block(self) -> Bytes:
        """The gradients of all blocks after it are reduced; those of the next one are just being sent."""
        weights = self.weights
        new = (weights.head + weights.block_trained) * self.size
        left = self.added_up(weights.root_trained + weights.block_trained)
        return {
            "gathered": self.gathered(1),
            "activations": self.block.saved(self.tokens) + self.block.backward(self.tokens),
            "gradients": self.reduced(weights.num_blocks - 1) + left + new,
            "buffers": weights.block_trained * FP32,
        }

    def at_embedding(self) -> Bytes:
        """When its gradient is made, a whole matrix."""
        new = (self.weights.head + self.weights.embedding) * self.size
        left = self.added_up(self.weights.root_trained)
        return {
            "gathered": self.gathered(0),
            "gradients": self.reduced(self.weights.num_blocks) + left + new,
            "buffers": self.weights.block_trained * FP32,
        }

    def reducing_root(self) -> Bytes:
        """A rank alone divides a copy of the gradients by 1."""
        root = self.weights.root_trained * FP32
        return {
            "gradients": self.reduced(self.weights.num_blocks) + root // self.shards,
            "buffers": root * (2 if self.shards == 1 else 1),
        }

    def asking(self, weights: Weights) -> Bytes:
        """While ``weights`` say how likely the labels of some micro-batches are; nothing is kept."""
        joined = largest_number([self.tokens] * self.num_microbatches, MAX_TOKENS[self.block.run.device])
        chunks = head(joined * self.labels, self.block.hidden, self.vocabulary, self.block.run)
        sent = weights.block * self.size if self.shards > 1 else 0
        return {
            "gathered": (weights.root + weights.block) * self.size + sent,
            "activations": max(self.block.forward(joined * self.tokens), chunks["activations"]),
            "logits": chunks["logits"],
        }

    def gathered(self, num_blocks: int) -> int:
        """Whole weights of so many blocks, and of what lies outside of them."""
        return (self.weights.root + num_blocks * self.weights.block) * self.size

    @property
    def sent(self) -> int:
        """A block's weights as its ranks send them to each other, from where they are copied."""
        return self.weights.block * self.size if self.shards > 1 else 0

    @property
    def saved(self) -> int:
        """Activations of all blocks and of the last norm."""
        norm = self.tokens * self.block.hidden * self.block.norm
        return self.weights.num_blocks * self.block.saved(self.tokens) + norm

    def added_up(self, numel: int) -> int:
        """Bytes of the gradients of ``numel`` parameters that micro-batches before this one have left."""
        return numel * FP32 if self.num_microbatches > 1 else 0

    def reduced(self, num_blocks: int) -> int:
        """Bytes of the shards of so many blocks' gradients."""
        return 0 if self.offloads else num_blocks * self.weights.block_trained * FP32 // self.shards

    @property
    def size(self) -> int:
        return self.block.run.size


def weigh(model: PreTrainedModel, tp: int, adapter: LoRA | None = None) -> Weights:
    """Counts the parameters of one tensor-parallel rank."""
    every = set(map(id, blocks(model)))
    names = tuple(f"{name}." for name, module in model.named_modules() if id(module) in every)
    found = list(parameters(model, tp, adapter))
    inside = [p for p in found if p.name.startswith(names)]
    outside = [p for p in found if not p.name.startswith(names)]
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    embedding, last = (-(-end.numel() // tp) if adapter is None and end.requires_grad else 0 for end in ends)
    return Weights(
        block=sum(p.numel for p in inside) // len(every),
        block_trained=sum(p.numel for p in inside if p.trained) // len(every),
        root=sum(p.numel for p in outside),
        root_trained=sum(p.numel for p in outside if p.trained),
        embedding=embedding,
        head=last,
        num_blocks=len(every),
    )


def block_of(
    model: PreTrainedModel, layout: "FSDP2", run: Run, workload: Workload, adapter: LoRA | None
) -> Block:
    config = model.config.get_text_config()
    norms = norms_of_a_block(model)
    of_heads = [name for name in norms if name in ("q_norm", "k_norm")]
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads, groups = config.num_attention_heads // layout.tp, shared // layout.tp
    query, key = heads * head_dim(model), groups * head_dim(model)
    repeats = layout.cp // gcd(groups, layout.cp)  # of key-value heads that cp ranks cannot share out
    return Block(
        run,
        hidden=config.hidden_size,
        norms=len(norms) - len(of_heads),
        norm=FP32 + (run.size if adapter is None else 0),
        normed_heads=query + key if of_heads else 0,
        attended=query + 2 * key * repeats,
        query=query,
        heads=heads,
        intermediate=intermediate_size(config) // layout.tp,
        products=4,
        masks=workload.rows * masks(workload.length, run),
    )
