"""What a rank of Megatron holds at the peak of a train step, from the shapes of the model alone.

Megatron itself is not imported.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.megatron import pipeline_split
from components.engines.megatron.layout import Layout
from components.models import mtp
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
    moe_activations,
    moe_block_numbers,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.parameter_counts import Cuts, Parameter, parameters
from components.preflight.estimates.quantities import MemoryInputs, MicrobatchShape, RankMemory


def memory(
    layout: Layout, model: PreTrainedModel, optimizer: Optimizer, step: MemoryInputs
) -> list[RankMemory]:
    """Of every pipeline stage."""
    run = RunShape(step.dtype, step.device, layout.activation_checkpointing)
    blocks = block_activations(model, layout, run, step.microbatch, step.adapter)
    shards = OptimizerShards.of(layout, step.world_size)
    asks = step.reference != "none" or step.loss.kind == "unpaired"
    found = []
    layers = stage_layers(layout, model)
    for number, chunks in enumerate(pipeline_split.chunk_layers(layout, model.config.num_hidden_layers)):
        weights = count_parameters(model, layout, "".join(chunks), layers[number], step.adapter)
        own = tuple(blocks[layer] for layer in layers[number] or [0])
        stage = StageMemory(
            number, chunks, weights, own, model.config.vocab_size, layout, shards, step.microbatch
        )
        resting = stage.between_steps(len(optimizer.moments))
        if step.reference == "frozen":
            other = step.reference_model or model
            theirs = pipeline_split.chunk_layers(layout, other.config.num_hidden_layers)[number]
            weighed = count_parameters(
                other, layout, "".join(theirs), stage_layers(layout, other)[number], None
            )
            resting["reference"] = (weighed.trained + weighed.frozen) * run.size
        asked = [*stage.moments(), *([stage.during_reference()] if asks else [])]
        parts = peak(add_by_name(resting, moment) for moment in asked)
        offloaded = ("masters", "moments") if layout.optimizer_cpu_offload else ()
        host = {name: parts.pop(name) for name in offloaded if name in parts}
        found.append(RankMemory(number, parts, host))
    return found


@dataclass(frozen=True)
class OptimizerShards:
    """Ranks that share what the optimizer keeps, of the experts and of everything else."""

    plain: int
    experts: int

    @classmethod
    def of(cls, layout: Layout, world_size: int) -> "OptimizerShards":
        if not layout.distributed_optimizer:
            return cls(1, 1)
        ranks = world_size // layout.pp
        return cls(ranks // layout.tp, ranks // (layout.etp * layout.ep))


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank of a stage, in elements."""

    trained: int
    trained_experts: int
    """Of them, those of experts."""
    frozen: int
    embedding: int
    """Of one matrix of the vocabulary, if it is trained."""
    matrix: int
    """Of the largest trained one in a layer."""
    tied: bool
    """Whether embedding and head are one matrix."""


@dataclass(frozen=True)
class StageMemory:
    """A train step of a rank of one pipeline stage."""

    number: int
    chunks: list[str]
    """What they hold, as ``stages.held`` says it."""
    weights: RankParameters
    blocks: tuple[BlockActivations, ...]
    """Its layers; one of the model's where it has none."""
    vocabulary: int
    layout: Layout
    shards: OptimizerShards
    workload: MicrobatchShape

    def between_steps(self, num_moments: int) -> Bytes:
        """Between two steps.

        Gradients lie in an fp32 buffer that is always there. Weights in fp32 are their own masters.
        """
        trained, experts = self.weights.trained, self.weights.trained_experts
        kept = (trained - experts) * FP32 // self.shards.plain + experts * FP32 // self.shards.experts
        return {
            "weights": (trained + self.weights.frozen) * self.size,
            "gradients": trained * FP32,
            "masters": 0 if self.size == FP32 else kept,
            "moments": kept * num_moments,
        }

    def moments(self) -> Iterator[Bytes]:
        """Those that can be its peak, beside ``resting``."""
        if self.holds("L"):
            yield self.during_head()
        yield self.during_last_layer()
        if self.holds("E"):
            yield self.during_embedding()
        # The norm of the gradient is a sum of float64, of one matrix after the other.
        yield {"buffers": 8 * max(self.weights.matrix, self.weights.embedding) // self.shards.plain}
        if (
            self.shards.plain > 1 and self.blocks[0].run.device == "cpu"
        ):  # gloo gathers updated weights into a copy
            yield {"buffers": self.weights.trained * self.size}

    def during_head(self) -> Bytes:
        """After the last layer of a micro-batch."""
        return add_by_name(
            head_activations(self.labels, self.hidden, self.vocabulary_rows, self.blocks[0].run),
            {
                "activations": self.in_flight * self.saved,
                "gradients": self.weights.embedding * FP32,
            },
        )

    def during_last_layer(self) -> Bytes:
        """In its backward pass; a matrix's gradient is added to the buffer when it is whole."""
        return {
            "activations": self.in_flight * self.saved
            + max(block.backward(self.tokens) for block in set(self.blocks)),
            "gradients": self.weights.matrix * self.size + self.between_microbatches,
        }

    def during_embedding(self) -> Bytes:
        """When its gradient is made, a whole matrix; other micro-batches are under way."""
        return {
            "activations": (self.in_flight - 1) * self.saved + self.tokens * self.hidden * self.size,
            "gradients": self.weights.embedding * self.size + self.between_microbatches,
        }

    @property
    def between_microbatches(self) -> int:
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
        layers = sum(b.saved(self.tokens) for b in self.blocks) if self.holds("t") else 0
        received = 0 if self.size == FP32 else self.tokens * self.blocks[0].hidden * self.size
        ends = (
            self.tokens * self.blocks[0].hidden * (self.blocks[0].norm + self.size) if self.holds("L") else 0
        )
        return layers // len(self.chunks) + received + ends

    def during_reference(self) -> Bytes:
        """While the labels of a micro-batch are given log-probabilities; nothing is kept."""
        chunks = head_activations(self.labels, self.hidden, self.vocabulary_rows, self.blocks[0].run)
        logits = chunks["logits"] if self.holds("L") else 0
        return {
            "activations": max(block.forward(self.tokens) for block in set(self.blocks)),
            "logits": logits,
        }

    def holds(self, what: str) -> bool:
        return any(what in chunk for chunk in self.chunks)

    @property
    def hidden(self) -> int:
        return self.blocks[0].hidden * (self.layout.tp if self.layout.sequence_parallel else 1)

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
        return self.blocks[0].run.size


def stage_layers(layout: Layout, model: PreTrainedModel) -> list[list[int]]:
    """By stage, the numbers of its layers."""
    return pipeline_split.numbered(layout, model.config.num_hidden_layers, mtp.num_mtp_layers(model.config))


def count_parameters(
    model: PreTrainedModel, layout: Layout, chunks: str, layers: Sequence[int], adapter: LoRA | None
) -> RankParameters:
    """Counts the parameters of a rank that holds ``chunks``, with these ``layers``."""
    found = list(parameters(model, Cuts(layout.tp, layout.ep, layout.etp), adapter))
    tied = model.config.tie_word_embeddings
    ends = {"E": ("model.embed_tokens.",), "L": ("model.norm.", "lm_head.")}
    if tied and "E" not in chunks:
        ends["L"] += ends["E"]
    names = tuple(name for what, names in ends.items() if what in chunks for name in names)
    share = [p for p in found if p.name.startswith(names)]
    layer = [p for p in found if p.name.startswith(tuple(f"model.layers.{n}." for n in layers))]
    return RankParameters(
        trained=count([*layer, *share], trained=True),
        trained_experts=count([p for p in layer if p.of_experts], trained=True),
        frozen=count([*layer, *share], trained=False),
        embedding=max((p.numel for p in share if p.trained), default=0),
        matrix=max((p.numel // max(p.number, 1) for p in layer if p.trained), default=0),
        tied=tied,
    )


def count(parameters: Sequence[Parameter], *, trained: bool) -> int:
    return sum(p.numel for p in parameters if p.trained is trained)


def block_activations(
    model: PreTrainedModel, layout: Layout, run: RunShape, workload: MicrobatchShape, adapter: LoRA | None
) -> list[BlockActivations]:
    """Megatron's own layers around our attention, in the order of the model.

    Every layer has cosines and sines of its own, for queries and for keys. The MLP adds an offset, which is
    0, to up, and keeps the sum as well. Norms are torch's: operator by operator on a CPU, in fp32; on a GPU
    one kernel, which keeps its argument.
    """
    config, of, tp = model.config, attention_shape(model.config), layout.tp
    number = of.number // tp
    query, key, value = number * of.key, of.shared // tp * of.key, of.shared // tp * of.value
    norm = run.size if run.device == "cuda" else FP32 + (FP32 if adapter is None else 0)
    normed = norms_heads(model)
    plain = BlockActivations(
        run,
        hidden=config.hidden_size // (tp if layout.sequence_parallel else 1),
        norms=norms_of_hidden(model),
        norm=norm,
        normed_heads=query + key if normed else 0,
        attended=attended(layout, query, key + value, normed=normed) + 4 * of.key,
        result=number * of.value,
        heads=number,
        mlp=mlp_activations(config.intermediate_size // tp, kept=5),
        latent=of.latent,
        masks=workload.rows * masks_of_a_row(layout, workload.length, run),
    )
    if not (routed := moe_block_numbers(model)):
        return [plain] * len(model.base_model.layers)
    # Ranks of tp have the same tokens, and pass on a part of them each, which ranks of etp gather again.
    mlp = moe_activations(model, run, split=layout.etp, shared_split=tp, share=layout.etp / tp)
    other = replace(plain, mlp=mlp)
    return [other if layer in routed else plain for layer in range(len(model.base_model.layers))]


def attended(layout: Layout, query: int, both: int, *, normed: bool) -> int:
    """Width of what attention keeps, with the fused projection of which keys and values are views.

    ``both``: of keys and values. It is kept by the norm of the keys, or by values. Ranks of cp keep copies:
    all keys and values that they have gathered, or what they have traded.
    """
    fused = query + both
    if layout.cp == 1:
        return query + both // 2 + fused
    copies = both * (layout.cp if layout.cp_comm_type == "all_gather" else 1)
    return query + copies + (fused if normed else 0)


def masks_of_a_row(layout: Layout, length: int, run: RunShape) -> int:
    """Of ``cp`` ranks that gather keys each has two of ``2 cp`` chunks, which meet ``2 cp + 1`` of them."""
    if layout.cp == 1 or layout.cp_comm_type == "a2a" or run.has_kernel:
        return mask_bytes(length, run)
    chunk = -(-length // (2 * layout.cp))
    return chunk * chunk * (2 * layout.cp + 1) * run.size
