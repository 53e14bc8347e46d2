"""What a rank of Megatron holds at the peak of a train step, from the shapes of the model alone.

Megatron itself is not imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.estimate import (
    FP32,
    Block,
    Bytes,
    Parameter,
    Run,
    head,
    head_dim,
    largest,
    masks,
    norms_of_a_block,
    parameters,
    together,
)
from components.engines.megatron import stages
from components.engines.megatron.layout import Layout
from components.optimizers import Optimizer
from runner.protocols import RankMemory, TrainStep, Workload


def memory(layout: Layout, model: PreTrainedModel, optimizer: Optimizer, step: TrainStep) -> list[RankMemory]:
    """Of every pipeline stage."""
    run = Run(step.dtype, step.device, layout.activation_checkpointing)
    block = block_of(model, layout, run, step.workload, step.adapter)
    shards = step.world_size // (layout.tp * layout.pp) if layout.distributed_optimizer else 1
    asks = step.reference != "none" or step.loss.kind == "unpaired"
    found = []
    for number, chunks in enumerate(stages.held(layout, model.config.num_hidden_layers)):
        weights = weigh(model, layout.tp, "".join(chunks), step.adapter)
        stage = Stage(number, chunks, weights, block, model.config.vocab_size, layout, shards, step.workload)
        resting = stage.resting(len(optimizer.moments))
        if step.reference == "frozen":
            other = step.reference_model or model
            theirs = stages.held(layout, other.config.num_hidden_layers)[number]
            weighed = weigh(other, layout.tp, "".join(theirs), None)
            resting["reference"] = (weighed.trained + weighed.frozen) * run.size
        asked = [*stage.moments(), *([stage.asking()] if asks else [])]
        parts = largest(together(resting, moment) for moment in asked)
        offloaded = ("masters", "moments") if layout.optimizer_cpu_offload else ()
        host = {name: parts.pop(name) for name in offloaded if name in parts}
        found.append(RankMemory(number, parts, host))
    return found


@dataclass(frozen=True)
class Weights:
    """Parameters of one rank of a stage, in elements."""

    trained: int
    frozen: int
    embedding: int
    """Of one matrix of the vocabulary, if it is trained."""
    matrix: int
    """Of the largest trained one in a layer."""
    tied: bool
    """Whether embedding and head are one matrix."""


@dataclass(frozen=True)
class Stage:
    """A train step of a rank of one pipeline stage."""

    number: int
    chunks: list[str]
    """What they hold, as ``stages.held`` says it."""
    weights: Weights
    block: Block
    vocabulary: int
    layout: Layout
    shards: int
    """Ranks that share what the optimizer keeps."""
    workload: Workload

    def resting(self, num_moments: int) -> Bytes:
        """Between two steps.

        Gradients lie in an fp32 buffer that is always there. Weights in fp32 are their own masters.
        """
        trained = self.weights.trained
        return {
            "weights": (trained + self.weights.frozen) * self.size,
            "gradients": trained * FP32,
            "masters": 0 if self.size == FP32 else trained * FP32 // self.shards,
            "moments": trained * FP32 * num_moments // self.shards,
        }

    def moments(self) -> Iterator[Bytes]:
        """Those that can be its peak, beside ``resting``."""
        if self.holds("L"):
            yield self.in_head()
        yield self.in_last_layer()
        if self.holds("E"):
            yield self.at_embedding()
        # The norm of the gradient is a sum of float64, of one matrix after the other.
        yield {"buffers": 8 * max(self.weights.matrix, self.weights.embedding) // self.shards}
        if self.shards > 1 and self.block.run.device == "cpu":  # gloo gathers updated weights into a copy
            yield {"buffers": self.weights.trained * self.size}

    def in_head(self) -> Bytes:
        """After the last layer of a micro-batch."""
        return together(
            head(self.labels, self.hidden, self.vocabulary_rows, self.block.run),
            {
                "activations": self.in_flight * self.saved,
                "gradients": self.weights.embedding * FP32,
            },
        )

    def in_last_layer(self) -> Bytes:
        """In its backward pass; a matrix's gradient is added to the buffer when it is whole."""
        return {
            "activations": self.in_flight * self.saved + self.block.backward(self.tokens),
            "gradients": self.weights.matrix * self.size + self.waiting,
        }

    def at_embedding(self) -> Bytes:
        """When its gradient is made, a whole matrix; other micro-batches are under way."""
        return {
            "activations": (self.in_flight - 1) * self.saved + self.tokens * self.hidden * self.size,
            "gradients": self.weights.embedding * self.size + self.waiting,
        }

    @property
    def waiting(self) -> int:
        """The gradient of a tied head, until that of the embedding is added to it."""
        together = self.weights.tied and self.holds("E") and self.holds("L")
        return self.weights.embedding * self.size if together else 0

    @property
    def in_flight(self) -> int:
        """How often a chunk has run forward and not yet backward, at most.

        1F1B: a stage runs as many as there are stages behind it before its first backward pass. Interleaved,
        twice as many, and all chunks but the last of as many micro-batches as there are stages.
        """
        pp, vpp, behind = self.layout.pp, self.layout.vpp, self.layout.pp - self.number - 1
        number = self.workload.num_microbatches
        if vpp == 1:
            return min(behind + 1, number)
        return min(2 * behind + (vpp - 1) * pp + 1, -(-number // pp) * pp * vpp)

    @property
    def saved(self) -> int:
        """Bytes of one chunk, for one micro-batch."""
        layers = "".join(self.chunks).count("t") / len(self.chunks)
        received = 0 if self.size == FP32 else self.tokens * self.block.hidden * self.size
        ends = self.tokens * self.block.hidden * (self.block.norm + self.size) if self.holds("L") else 0
        return int(layers * self.block.saved(self.tokens)) + received + ends

    def asking(self) -> Bytes:
        """While the labels of a micro-batch are given log-probabilities; nothing is kept."""
        chunks = head(self.labels, self.hidden, self.vocabulary_rows, self.block.run)
        logits = chunks["logits"] if self.holds("L") else 0
        return {"activations": self.block.forward(self.tokens), "logits": logits}

    def holds(self, what: str) -> bool:
        return any(what in chunk for chunk in self.chunks)

    @property
    def hidden(self) -> int:
        return self.block.hidden * (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def vocabulary_rows(self) -> int:
        return -(-self.vocabulary // self.layout.tp)

    @property
    def tokens(self) -> int:
        """Of this rank's share of a micro-batch."""
        return self.workload.rows * -(-self.workload.length // self.layout.cp)

    @property
    def labels(self) -> int:
        """Of them: at most all there are, as a rank of cp may have the end of every sequence."""
        return min(self.workload.labels, self.tokens)

    @property
    def size(self) -> int:
        return self.block.run.size


def weigh(model: PreTrainedModel, tp: int, chunks: str, adapter: LoRA | None) -> Weights:
    """Counts the parameters of a rank that holds ``chunks``."""
    config = model.config
    found = list(parameters(model, tp, adapter))
    tied = config.tie_word_embeddings
    layer = [p for p in found if ".layers." in p.name]
    ends = {"E": ("model.embed_tokens.",), "L": ("model.norm.", "lm_head.")}
    if tied and "E" not in chunks:
        ends["L"] += ends["E"]
    names = tuple(name for what, names in ends.items() if what in chunks for name in names)
    share = [p for p in found if p.name.startswith(names)]
    layers = chunks.count("t")
    return Weights(
        trained=count(layer, trained=True) * layers // config.num_hidden_layers + count(share, trained=True),
        frozen=count(layer, trained=False) * layers // config.num_hidden_layers + count(share, trained=False),
        embedding=max((p.numel for p in share if p.trained), default=0),
        matrix=max((p.numel for p in layer if p.trained), default=0),
        tied=tied,
    )


def count(parameters: Sequence[Parameter], *, trained: bool) -> int:
    return sum(p.numel for p in parameters if p.trained is trained)


def block_of(
    model: PreTrainedModel, layout: Layout, run: Run, workload: Workload, adapter: LoRA | None
) -> Block:
    """Megatron's own layer around our attention.

    Every layer has cosines and sines of its own, for queries and for keys. The MLP adds an offset, which is
    0, to up, and keeps the sum as well. Norms are torch's: operator by operator on a CPU, in fp32; on a GPU
    one kernel, which keeps its argument.
    """
    config, tp = model.config, layout.tp
    norms = norms_of_a_block(model)
    of_heads = [name for name in norms if name in ("q_norm", "k_norm")]
    heads, width = config.num_attention_heads // tp, head_dim(model)
    query, key = heads * width, config.num_key_value_heads // tp * width
    norm = run.size if run.device == "cuda" else FP32 + (FP32 if adapter is None else 0)
    split = tp if layout.sequence_parallel else 1
    return Block(
        run,
        hidden=config.hidden_size // split,
        norms=len(norms) - len(of_heads),
        norm=norm,
        normed_heads=query + key if of_heads else 0,
        attended=attended(layout, query, key, normed=bool(of_heads)) + 4 * width,
        query=query,
        heads=heads,
        intermediate=config.intermediate_size // tp,
        products=5,
        masks=workload.rows * masks_of_a_row(layout, workload.length, run),
    )


def attended(layout: Layout, query: int, key: int, *, normed: bool) -> int:
    """Width of what attention keeps, with the fused projection of which keys and values are views.

    It is kept by the norm of the keys, or by values. Ranks of cp keep copies: all keys and values that they
    have gathered, or what they have traded.
    """
    fused = query + 2 * key
    if layout.cp == 1:
        return query + key + fused
    copies = 2 * key * (layout.cp if layout.cp_comm_type == "all_gather" else 1)
    return query + copies + (fused if normed else 0)


def masks_of_a_row(layout: Layout, length: int, run: Run) -> int:
    """Of ``cp`` ranks that gather keys each has two of ``2 cp`` chunks, which meet ``2 cp + 1`` of them."""
    if layout.cp == 1 or layout.cp_comm_type == "a2a" or run.has_kernel:
        return masks(length, run)
    chunk = -(-length // (2 * layout.cp))
    return chunk * chunk * (2 * layout.cp + 1) * run.size
