"""The parameters of a model, and how many elements of each a rank holds, for both engines' estimates."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.models.experts import EXPERT_PARAM

CUT = re.compile(r"\.([qkvo]|q_b|kv_b|gate|up|down|eh)_proj\.|^model\.embed_tokens\.|^lm_head\.")
"""What tensor parallelism splits, by names on disk; other parameters are whole on every rank."""

CUT_ADAPTER = re.compile(r"\.([qkv]|q_b|kv_b|gate|up)_proj\.lora_B\.|\.(o|down)_proj\.lora_A\.")
"""Of two small matrices, that on the side where the large one is cut."""


@dataclass(frozen=True)
class Parameter:
    """Of the model or of its adapter; of the experts of a layer all that have this name, as one."""

    name: str
    numel: int
    trained: bool
    cut: bool
    """Whether tensor parallelism splits it."""
    number: int = 0
    """Of experts, how many there are; 0: it is of none."""

    @property
    def of_experts(self) -> bool:
        return self.number > 0


@dataclass(frozen=True)
class Cuts:
    """How many ranks split the matrices, share out the experts, and split the matrices of an expert."""

    tp: int = 1
    ep: int = 1
    etp: int = 1


@lru_cache(maxsize=8)  # a model of experts has thousands, and a search asks for every layout
def census(model: PreTrainedModel, adapter: LoRA | None = None) -> tuple[Parameter, ...]:
    """Those of ``model`` and of the adapter beside it, tied ones once."""
    found: dict[tuple[str, bool], Parameter] = {}

    def add(name: str, numel: int, *, trained: bool, cut: bool, beside: bool = False) -> None:
        of_expert = EXPERT_PARAM.match(name)
        if of_expert is None:
            found[name, beside] = Parameter(name, numel, trained, cut)
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
    return tuple(found.values())


@lru_cache(maxsize=32)
def parameters(model: PreTrainedModel, cuts: Cuts, adapter: LoRA | None = None) -> tuple[Parameter, ...]:
    """As one rank holds them, before data-parallel ranks share them."""

    def cut(p: Parameter) -> Parameter:
        if p.of_experts:
            ranks = cuts.ep * (cuts.etp if p.cut else 1)
            return replace(p, numel=-(-p.numel // ranks), number=-(-p.number // cuts.ep))
        return replace(p, numel=-(-p.numel // cuts.tp)) if p.cut else p

    return tuple(cut(p) for p in census(model, adapter))
