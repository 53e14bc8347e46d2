"""Numbers of elements of the parameters of the model chunks of a Megatron rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.megatron import pipeline_split
from components.engines.megatron.layout import Layout
from components.models import mtp
from components.models.scalar_head import ties_embedding
from components.preflight.estimates.activation_memory import (
    FP32,
)
from components.preflight.estimates.parameter_counts import ParallelSizes, Parameter, parameters


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank of a pipeline stage, in elements."""

    trained: int
    trained_experts: int
    """Trained expert parameters."""
    frozen: int
    initial: int
    """Elements of ``frozen`` that are in fp32."""
    embedding: int
    """Size of an embedding or head matrix, 0 if it is frozen."""
    in_layers: int
    """Elements of all parameters of layers."""
    matrix: int
    """Size of the largest trained matrix of a layer."""
    experts_of_a_layer: int
    """Trained expert parameters of a layer, the maximum over layers."""
    tied: bool
    """Whether embedding and head are tied."""

    def num_bytes(self, size: int) -> int:
        """Return the bytes of all parameters in a dtype of ``size`` bytes, with ``initial`` in fp32."""
        return (self.trained + self.frozen) * size + self.initial * (FP32 - size)


def stage_layers(layout: Layout, model: PreTrainedModel) -> list[list[int]]:
    """Return the layer numbers of each stage."""
    return pipeline_split.numbered(layout, model.config.num_hidden_layers, mtp.num_mtp_layers(model.config))


def count_parameters(
    model: PreTrainedModel, layout: Layout, chunks: str, layers: Sequence[int], adapter: LoRA | None
) -> RankParameters:
    """Count the parameters of a rank that has the layers with the numbers ``layers``.

    ``chunks`` are the joined contents of its chunks, in the letters of ``pipeline_split.chunk_layers``.
    """
    sizes = ParallelSizes(layout.tp, layout.ep, layout.etp)
    layer, share = stage_parameters(model, sizes, chunks, layers, adapter)
    return RankParameters(
        trained=count([*layer, *share], trained=True),
        trained_experts=count([p for p in layer if p.of_experts], trained=True),
        frozen=count([*layer, *share], trained=False),
        initial=sum(p.numel for p in layer if p.initial),
        embedding=max((p.numel for p in share if p.trained), default=0),
        in_layers=sum(p.numel for p in layer),
        matrix=max((p.numel // max(p.number, 1) for p in layer if p.trained), default=0),
        experts_of_a_layer=largest_experts(layer),
        tied=ties_embedding(model),
    )


def largest_experts(found: Sequence[Parameter]) -> int:
    """Return the largest number of trained expert parameters of a layer."""
    sizes = Counter[str]()
    for p in found:
        if p.of_experts and p.trained:
            sizes[p.name.partition(".mlp.")[0]] += p.numel
    return max(sizes.values(), default=0)


def stage_parameters(
    model: PreTrainedModel, sizes: ParallelSizes, chunks: str, layers: Sequence[int], adapter: LoRA | None
) -> tuple[list[Parameter], list[Parameter]]:
    """Return the parameters of the layers of a rank, and those of its embedding, last norm and head."""
    found = parameters(model, sizes, adapter)
    ends = {"E": ("model.embed_tokens.",), "L": ("model.norm.", "lm_head.", "score.")}
    embeds_again = mtp.num_mtp_layers(model.config) > 0  # MTP layers embed the following tokens
    if "E" not in chunks and (ties_embedding(model) or embeds_again):
        ends["L"] += ends["E"]
    names = tuple(name for what, names in ends.items() if what in chunks for name in names)
    share = [p for p in found if p.name.startswith(names)]
    return [p for p in found if p.name.startswith(tuple(f"model.layers.{n}." for n in layers))], share


def count(parameters: Sequence[Parameter], *, trained: bool) -> int:
    return sum(p.numel for p in parameters if p.trained is trained)
