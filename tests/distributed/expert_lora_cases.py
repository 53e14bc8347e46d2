"""Rank functions for adapters on experts on both engines, and the same with transformers and torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from components.adapters import LoRA
from components.checkpoint.dcp import save_tensors
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.experts import FUSED, unstack_experts
from tests.distributed.cases import make_engine, next_token, plain_model, spec
from tests.distributed.megatron_lora_cases import Run, plain_run, run_on, sums, warm

ADAPTER = warm()


class Merged(nn.Module):
    """transformers' model with an adapter that is added to its weights, expert by expert, under autograd."""

    def __init__(self, family: str, adapter: LoRA) -> None:
        super().__init__()
        description = spec(family)
        meta = description.build(description.config())
        self.model, self.scaling, self.enabled = plain_model(family), adapter.scaling, True
        draw = adapter.weights(meta, 0, description.weights(0))
        self.values = {name: draw(name).requires_grad_() for name in adapter.shapes(meta)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.values.items()  # type: ignore[misc]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.enabled = False
        yield
        self.enabled = True

    def forward(self, **inputs: Any) -> Any:
        return functional_call(self.model, self.weights() if self.enabled else {}, kwargs=inputs)

    def weights(self) -> dict[str, Tensor]:
        whole = {name: p.detach() for name, p in self.model.named_parameters()}
        found = dict(unstack_experts(whole.items()))
        for name in [name for name in self.values if ".lora_A." in name]:
            module = name.removesuffix(".lora_A.weight")
            added = self.values[f"{module}.lora_B.weight"] @ self.values[name]
            found[f"{module}.weight"] = found[f"{module}.weight"] + self.scaling * added
        return {name: stacked(name, found) for name in whole}


def stacked(name: str, found: dict[str, Tensor]) -> Tensor:
    """Return a parameter of transformers, which stacks the matrices of all experts."""
    match = FUSED.fullmatch(name)
    if match is None or name in found:
        return found[name]
    number = sum(other.startswith(match["experts"] + ".") for other in found) // 3
    leaves = ("down_proj",) if match["leaf"] == "down_proj" else ("gate_proj", "up_proj")
    each = [[found[f"{match['experts']}.{n}.{leaf}.weight"] for leaf in leaves] for n in range(number)]
    return torch.stack([torch.cat(parts) for parts in each])


def plain_train(family: str, adapter: LoRA, stage: str = "sft", steps: int = 3) -> Run:
    return plain_run(Merged(family, adapter), stage, steps)


def save(on: FSDP2 | Megatron, family: str, adapter: LoRA, folder: Path) -> list[list[Tensor]]:
    """Train two steps, save a checkpoint and an export, and train two more steps.

    Return the sums of log-probabilities at the checkpoint with and without the adapter, and the last steps.
    """
    engine = make_engine(family, on=on, adapter=adapter, reference="adapter_off")
    run_on(engine, next_token(), 2)
    save_tensors(folder / "checkpoint", engine.tensors())
    engine.export(folder / "export")
    found = [sums(engine, reference=False), sums(engine, reference=True)]
    found.append([torch.tensor(row) for row in run_on(engine, next_token(), 2).curve])
    engine.close()
    return found


def go_on(on: FSDP2 | Megatron, family: str, adapter: LoRA, folder: Path) -> list[tuple[float, float]]:
    engine = make_engine(family, on=on, adapter=adapter)
    engine.load(folder / "checkpoint")
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after
