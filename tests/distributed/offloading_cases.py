"""Rank functions of test_activation_offloading.py."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from components.adapters import LoRA
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.engines.shared.activation_offloading import ActivationOffloading, Group, View
from components.engines.shared.torch_private import storage_key
from tests.distributed.cases import make_engine, next_token
from tests.distributed.megatron_lora_cases import Run, run_on, sums

Case = tuple[FSDP2 | Megatron, str, Mapping[str, Any]]
"""Layout, model family, and further options of the engine."""


def differences(cases: Mapping[str, Case]) -> list[str]:
    """Return the names of ``cases`` whose steps change if activations are offloaded, or where none are."""
    found = []
    for name, (on, family, options) in cases.items():
        plain = train(on, family, **options)
        with copying() as counts:
            offloaded = train(replace(on, activation_offloading=True), family, **options)
        moved = 0 < counts["back"] < counts["there"] and not counts["parameters"]
        if not same(offloaded, plain) or not moved:
            found.append(f"{name}: {counts}")
    return found


def train(on: FSDP2 | Megatron, family: str, **options: Any) -> Run:
    engine = make_engine(family, on=on, **options)
    made = run_on(engine, next_token(), 2)
    sums(engine, reference="adapter" in options)  # without gradient
    engine.close()
    return made


def same(one: Run, other: Run) -> bool:
    equal = [torch.equal(gradient, other.grads[name]) for name, gradient in one.grads.items()]
    return one.curve == other.curve and one.grads.keys() == other.grads.keys() and all(equal)


@contextmanager
def copying() -> Iterator[dict[str, int]]:
    """Let offloading copy tensors to other memory of the host, as from a GPU.

    Yield the numbers of tensors that went there, of parameters among them, and of storages that came back.
    """
    counts = {"there": 0, "parameters": 0, "back": 0}
    models: list[nn.Module] = []
    pack, fetch, apply = (getattr(ActivationOffloading, name) for name in ("_pack", "_fetch", "apply"))

    def applied(self: ActivationOffloading, model: nn.Module, *modules: Any) -> None:
        models.append(model)
        apply(self, model, *modules)

    def copied(self: ActivationOffloading, tensor: Tensor) -> Tensor | View:
        with mock.patch.object(Tensor, "to", lambda tensor, *_, **__: tensor.clone()):
            packed = pack(self, tensor)
        counts["there"] += isinstance(packed, View)
        gathered = {storage_key(parameter) for model in models for parameter in model.parameters()}
        counts["parameters"] += isinstance(packed, View) and storage_key(tensor) in gathered
        return packed

    def counted(self: ActivationOffloading, group: Group) -> None:
        counts["back"] += sum(saved.device is None for saved in group.alive())
        fetch(self, group)

    with (
        mock.patch.object(ActivationOffloading, "_pack", copied),
        mock.patch.object(ActivationOffloading, "_fetch", counted),
        mock.patch.object(ActivationOffloading, "apply", applied),
    ):
        yield counts


ADAPTED = {"adapter": LoRA(r=3, alpha=4.0, init_lora_weights="pissa"), "reference": "adapter_off"}
HALF = {"dtype": torch.bfloat16}
