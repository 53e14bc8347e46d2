"""The parameters of a model and their sizes on one rank, for the estimates of both engines."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.engines.shared.whole_weights import owners
from components.models.experts import EXPERT_PARAM
from components.models.nf4 import num_bytes
from components.optimizers import Muon, Optimizer, state_bytes

CUT = re.compile(r"\.([qkvo]|q_b|kv_b|gate|up|down|eh)_proj\.|^model\.embed_tokens\.|^lm_head\.")
"""Pattern of the Hugging Face names of parameters that tensor parallelism splits. Others are replicated."""

CUT_ADAPTER = re.compile(r"\.([qkv]|q_b|kv_b|gate|up)_proj\.lora_B\.|\.(o|down)_proj\.lora_A\.")
"""Adapter matrices that tensor parallelism splits: those on the split side of the frozen matrix."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model or its adapter. The experts of a layer count as one parameter per matrix."""

    name: str
    numel: int
    trained: bool
    cut: bool
    """Whether tensor parallelism splits the parameter."""
    number: int = 0
    """Number of experts. 0 means that this is not an expert parameter."""
    quantized_bytes: int = 0
    """Bytes of a 4-bit matrix and its scales. 0 means that the parameter is in fp32 or ``run.dtype``."""
    initial: bool = False
    """Whether the parameter is an initial factor of PiSSA, which is frozen in fp32."""

    @property
    def of_experts(self) -> bool:
        return self.number > 0


@dataclass(frozen=True)
class ParallelSizes:
    """Numbers of ranks that split matrices (tp), experts (ep), and the matrices of an expert (etp)."""

    tp: int = 1
    ep: int = 1
    etp: int = 1


@lru_cache(maxsize=8)  # MoE models have thousands of parameters, and a search calls this for every layout
def model_parameters(model: PreTrainedModel, adapter: LoRA | None = None) -> tuple[Parameter, ...]:
    """Return the parameters of ``model`` and of its adapter.

    Tied parameters are listed once, and the matrices of all experts of a layer as one parameter.
    """
    found: dict[tuple[str, bool], Parameter] = {}
    quantized = set() if adapter is None else adapter.quantized_weights(model)

    def add(name: str, numel: int, *, trained: bool, cut: bool, beside: bool = False) -> None:
        of_expert = EXPERT_PARAM.match(name)
        if of_expert is None:
            stored = num_bytes(numel) if name in quantized and not beside else 0
            found[name, beside] = Parameter(name, numel, trained, cut, quantized_bytes=stored)
            return
        name = f"{of_expert['experts']}.{of_expert['leaf']}"
        before = found.get((name, beside), Parameter(name, 0, trained, cut))
        trained = trained or before.trained
        found[name, beside] = replace(
            before, numel=before.numel + numel, number=before.number + 1, trained=trained
        )

    for name, p in model.named_parameters():
        wants = p.requires_grad and adapter is None
        add(name, p.numel(), trained=wants, cut=CUT.search(name) is not None)
    for name, shape in ({} if adapter is None else adapter.shapes(model)).items():
        cut = CUT_ADAPTER.search(name) is not None
        add(name, prod(shape), trained=True, cut=cut, beside=True)
    initial = {} if adapter is None else adapter.initial_shapes(model)
    factors = (
        Parameter(name, prod(shape), trained=False, cut=CUT_ADAPTER.search(name) is not None, initial=True)
        for name, shape in initial.items()
    )
    return (*found.values(), *factors)


@lru_cache(maxsize=32)
def parameters(
    model: PreTrainedModel, sizes: ParallelSizes, adapter: LoRA | None = None
) -> tuple[Parameter, ...]:
    """Return the parameters with their sizes on one rank, before data-parallel sharding."""

    def cut(p: Parameter) -> Parameter:
        if p.of_experts:
            ranks = sizes.ep * (sizes.etp if p.cut else 1)
            return replace(p, numel=-(-p.numel // ranks), number=-(-p.number // sizes.ep))
        return replace(p, numel=-(-p.numel // sizes.tp)) if p.cut else p

    return tuple(cut(p) for p in model_parameters(model, adapter))


class OwnedState(NamedTuple):
    """Bytes on the rank with the most state, if each full (unsharded) weight is updated by one owner rank."""

    weights: int
    moments: int
    unshared: int
    """Bytes of the weights that only this rank has."""
    buffers: int
    """Bytes of two copies of the largest weight, while it is updated. AdamW in Muon needs one."""


def owned_state(optimizer: Optimizer, found: Sequence[Parameter], plain: int, experts: int) -> OwnedState:
    """Distribute full weights over owners as the engines do, and return the state of the fullest rank.

    ``found`` are the parameters, with the experts of one rank. A weight is shared by ``plain`` ranks, or by
    ``experts`` ranks if it belongs to an expert.
    """
    each = [
        (experts if p.of_experts else plain, 4 * p.numel // max(p.number, 1), p.name)
        for p in found
        if p.trained
        for _ in range(max(p.number, 1))
    ]
    held, per_element, buffers = {0: (0, 0, 0)}, state_bytes(optimizer), 0
    places = owners((ranks, size) for ranks, size, _ in each)
    for (ranks, size, name), owner in zip(each, places, strict=True):
        alone = isinstance(optimizer, Muon) and optimizer.orthogonalises(name, 2)
        buffers = max(buffers, size * (2 if alone or not isinstance(optimizer, Muon) else 1))
        weights, moments, unshared = held.get(owner, (0, 0, 0))
        moments += size if alone else int(size * per_element / 4)
        held[owner] = weights + size, moments, unshared + size * (ranks == 1)
    return OwnedState(*max(held.values(), key=lambda state: state[0] + state[1]), buffers)
