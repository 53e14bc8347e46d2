"""Rank functions of test_fsdp2_adapters.py, and the same training with plain peft and torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor

from components.adapters import LoRA, lora
from components.contracts.batch import IGNORE
from components.engines.fsdp2 import FSDP2
from tests.distributed.cases import (
    Step,
    assert_same,
    make_engine,
    next_token,
    plain_model,
    sequences,
    share,
    step,
)
from tests.distributed.gradients import capture

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"], "use_rslora": True},
    "all": {"target_modules": "all-linear", "r": 3},
    "wide": {"target_modules": "all-linear", "r": 16},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "saved": {
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": ["lm_head", "model.norm", "model.embed_tokens"],
    },
}
# Layers without an adapter are in 4 bits, too, except those that are trained whole.
NF4: dict[str, dict[str, Any]] = {
    "nf4": {"target_modules": ["q_proj", "down_proj"]},
    "nf4 saved": {"target_modules": ["q_proj"], "modules_to_save": ["model.norm", "layers.1.mlp.up_proj"]},
}
CHANGES: dict[str, dict[str, Any]] = {"dora": {"dora": True}} | {kind: {"quantize": "nf4"} for kind in NF4}


@dataclass(frozen=True)
class Trained:
    """Result of ``STEPS`` steps on one batch."""

    first: Step
    """First step with the gradients of the adapter."""
    losses: list[float]
    after: dict[str, Tensor]
    """Weights of the adapter after all steps."""
    reference: list[Tensor]
    """Log-probabilities of the labels of each sequence under the frozen model."""


def name_in_file(name: str) -> str:
    for part in (".default", ".modules_to_save"):
        name = name.replace(part, "")
    name = name.removeprefix("base_model.model.")
    return name.removesuffix(".weight") if "magnitude" in name else name


def trained(model: Any) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name_in_file(name): parameter for name, parameter in named if parameter.requires_grad}


def label_logps(model: Any) -> list[Tensor]:
    found = []
    for row in sequences():
        logits = model(input_ids=row.ids[None], use_cache=False).logits[0].log_softmax(-1)
        kept = row.labels != IGNORE
        found.append(logits[kept].gather(1, row.labels[kept, None])[:, 0])
    return found


def plain_adapter(family: str, kind: str, folder: Path) -> Trained:
    """Write an adapter without zero matrices to ``folder``, then train it."""
    torch.manual_seed(2)
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | (KINDS | NF4)[kind]
    base = plain_model(family)
    if kind in NF4:
        round_matrices(base, settings.get("modules_to_save", ()))
    model = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in trained(model).items():
            if ".lora_A." not in name:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    weights = trained(model)
    decayed = [p for p in weights.values() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in weights.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    with torch.no_grad(), model.disable_adapter():
        reference = label_logps(model)
    losses, steps = [], []
    for _ in range(STEPS):
        steps.append(plain_step(model, weights))
        losses.append(steps[-1].loss)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(steps[0], losses, {name: p.detach().clone() for name, p in weights.items()}, reference)


def round_matrices(model: torch.nn.Module, but: Sequence[str] = ()) -> None:
    """Give linear layers except the head the values that bitsandbytes dequantises."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", *but)):
            packed, state = quantize_4bit(module.weight.data, compress_statistics=True, quant_type="nf4")
            module.weight.data.copy_(dequantize_4bit(packed, state))


class Plain:
    """Results of peft and the folder of the initial adapter, computed once for each case."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, dict[tuple[str, str], Trained]()

    def __call__(self, family: str, kind: str) -> tuple[Path, Trained]:
        folder = self.root / f"{family}_{kind}"
        if (family, kind) not in self.made:
            self.made[family, kind] = plain_adapter(family, kind, folder)
        return folder, self.made[family, kind]


def assert_equal(found: Trained, expected: Trained) -> None:
    assert_same(found.first, expected.first)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.after.keys() == expected.after.keys()
    for name, value in expected.after.items():
        torch.testing.assert_close(found.after[name], value, rtol=1e-4, atol=1e-5)


def plain_step(model: Any, weights: dict[str, Tensor]) -> Step:
    total = torch.zeros(())
    for row in sequences():
        logits = model(input_ids=row.ids[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, row.labels, ignore_index=IGNORE, reduction="sum")
    count = sum(int((row.labels != IGNORE).sum()) for row in sequences())
    (total / count).backward()
    grads = {name: p.grad.clone() for name, p in weights.items() if p.grad is not None}
    return Step(total.item() / count, torch.stack([g.norm() for g in grads.values()]).norm().item(), grads)


def continued(folder: Path, **changes: Any) -> LoRA:
    read = dict.fromkeys(("r", "alpha", "target_modules", "rslora", "modules_to_save", "init_lora_weights"))
    settings: dict[str, Any] = {"dropout": 0.0, "dora": False, "quantize": None, "path": str(folder)}
    settings["pissa_niter"] = None
    return lora(**read | settings | changes)


def engine_steps(on: FSDP2, family: str, layout: str, folder: Path, kind: str) -> Trained:
    """Train the same adapter on this rank's share of the batch.

    ``reference`` covers the sequences of this rank in the order of the batch.
    """
    adapter = continued(folder, **CHANGES.get(kind, {}))
    engine = make_engine(family, on=on, adapter=adapter, reference="adapter_off")
    batches = share(engine, layout, 2)
    # Preference losses compute the reference before the step.
    reference = [
        values[batch.labels != IGNORE]
        for values, batch in zip(engine.logps(batches, reference=True), batches, strict=True)
    ]
    grads = capture(engine)
    result = step(engine, batches, next_token())
    first = Step(result.loss, result.grad_norm, dict(grads))
    losses = [result.loss] + [step(engine, batches, next_token()).loss for _ in range(STEPS - 1)]
    after = {name: whole_of(p) for name, p in engine.weights.items()}
    assert all(p.grad is None for _, p in engine.named_weights)
    again = engine.logps(batches, reference=True)
    for values, batch, before in zip(again, batches, reference, strict=True):
        assert torch.equal(values[batch.labels != IGNORE], before)  # the frozen model is unchanged
    engine.close()
    return Trained(first, losses, after, reference)


def whole_of(parameter: Tensor) -> Tensor:
    from components.engines.fsdp2.mesh import full_tensor

    return full_tensor(parameter.detach()).clone()
