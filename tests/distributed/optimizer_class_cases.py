"""Runs with optimizers of other classes than ours, on the ranks of a layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.optim import AdamW8bit
from schedulefree import AdamWScheduleFree
from torch import Tensor

from components.checkpoint.dcp import save_tensors
from components.contracts.batch import IGNORE
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.mesh import full_tensor
from components.optimizers import Muon, Optimizer, TorchClass, muon_in_float32
from tests.distributed.cases import make_engine, next_token, plain_model, sequences, share, step


class Lion(torch.optim.Optimizer):
    """Signs of an averaged gradient (Chen et al., 2023, algorithm 2): the whole file of a user."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


class Adapted(torch.optim.Optimizer):
    """Descends with a step size ``d`` that, from the fourth update on, depends on all weights' gradients.

    Like classes of D-Adaptation, it adds its numbers to its groups in updates. It divides each gradient by a
    sum of norms, a number of each weight, and adds a mean of rows, except to weights that are zero.
    """

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        first = self.param_groups[0]
        updated = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        total = first.get("total", 0.0) + sum(p.grad.square().sum().item() for _, p in updated)
        count = first.get("k", 0) + 1
        for group in self.param_groups:
            group |= {"total": total, "k": count, "d": 1.0 if count < 4 else 1 / (1 + total)}
        for group, p in updated:
            state, row = self.state[p], p.grad[:1].clone() if p.any() else torch.zeros(())
            state["norm"] = state.get("norm", 1.0) + p.grad.norm().item()
            state["rows"] = row.lerp_(state.get("rows", row), 0.5)
            p.sub_(p.grad + row, alpha=group["lr"] * group["d"] / state["norm"])


DESCRIPTIONS: dict[str, Optimizer] = {
    "muon": Muon(lr=1e-2, adamw_lr=2e-3),
    "muon by head": Muon(lr=1e-2, adamw_lr=2e-3, head_dim=8),
    "original muon": Muon(lr=1e-2, adjust_lr="original", nesterov=False, weight_decay=0.0),
    "radam": TorchClass(torch.optim.RAdam, 1e-2, 0.1, options={"betas": [0.9, 0.95]}),
    "nadam": TorchClass(torch.optim.NAdam, 1e-2),
    "rprop": TorchClass(torch.optim.Rprop, 1e-3),  # its state does not begin with zeros
    "adafactor": TorchClass(torch.optim.Adafactor, 1e-2, 0.1),
    "schedule-free": TorchClass(AdamWScheduleFree, 1e-2, 0.1, options={"warmup_steps": 3}),
    "lion": TorchClass(Lion, 1e-3, 0.1),
    "adamw 8 bit": TorchClass(AdamW8bit, 1e-2, 0.1, options={"min_8bit_size": 512}),
    "adapted": TorchClass(Adapted, 1e-2),
}


Row = tuple[float, float, float]
"""Loss, gradient norm and evaluation of a step."""


def trained(on: FSDP2, name: str, folder: Path, family: str = "qwen3") -> list[Row]:
    """Return the loss, gradient norm and evaluation of five steps; save the state before steps 0 and 2."""
    engine = make_engine(family, on=on, optimizer=DESCRIPTIONS[name])
    curve = []
    for number in range(5):
        if number in (0, 2):
            save_tensors(folder / str(number), engine.tensors())
        curve.append(one_step(engine, number))
    engine.close()
    return curve


def resumed(on: FSDP2, name: str, folder: Path, first: int, family: str = "qwen3") -> list[Row]:
    """Return the rest of the curve of ``trained``, from its checkpoint before step ``first``."""
    engine = make_engine(family, on=on, optimizer=DESCRIPTIONS[name])
    engine.load(folder / str(first))
    curve = [one_step(engine, number) for number in range(first, 5)]
    engine.close()
    return curve


def without_rounding(curve: Callable[..., list[Row]], *args: Any) -> list[Row]:
    """Call ``curve``, which is ``trained`` or ``resumed``, with Newton-Schulz iterations in float32."""
    with muon_in_float32():
        return curve(*args)


def one_step(engine: Any, number: int) -> Row:
    loss = next_token()
    result = step(engine, share(engine, "packed", 2, seed=number % 2), loss)
    evaluation = engine.evaluate([share(engine, "packed", 2)], loss)["loss"]
    return result.loss, result.grad_norm, evaluation


def fast_muon(on: FSDP2, shards: bool = False) -> list[float]:
    """Return the losses of five steps at a high rate; with ``shards``, these are orthogonalised."""
    with pytest.MonkeyPatch.context() as patch:
        if shards:
            patch.setattr(Muon, "scope", "element")
        engine = make_engine(on=on, optimizer=DESCRIPTIONS["muon"])
        batches = share(engine, "packed", 2)
        losses = [step(engine, batches, next_token(), lr=1e-2).loss for _ in range(5)]
        engine.close()
    return losses


def muon_losses(family: str) -> list[float]:
    """Return the loss of each of four steps on the same sequences."""
    engine = make_engine(family, optimizer=DESCRIPTIONS["muon"])
    losses = [step(engine, share(engine, "packed", 2), next_token()).loss for _ in range(4)]
    engine.close()
    return losses


def by_hand(family: str) -> list[float]:
    """Return the loss of each of four steps of transformers' model with ``torch.optim.Muon``."""
    description = DESCRIPTIONS["muon"]
    assert isinstance(description, Muon)
    model, losses = plain_model(family), []
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name and "head" not in name]
    vectors = [p for p in named.values() if p.ndim < 2]
    others = [p for p in named.values() if not any(p is known for known in (*matrices, *vectors))]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": others, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=2e-4, betas=(0.9, 0.95))
    for _ in range(4):
        rows = sequences()
        total = sum(
            F.cross_entropy(
                model(input_ids=row.ids[None], use_cache=False).logits[0],
                row.labels,
                ignore_index=IGNORE,
                reduction="sum",
            )
            for row in rows
        )
        loss = total / sum(int((row.labels != IGNORE).sum()) for row in rows)
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return losses


def exported(on: FSDP2, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the next step, and those of a checkpoint of the model only, after three steps."""
    engine = make_engine(on=on, optimizer=DESCRIPTIONS["schedule-free"])
    for _ in range(3):
        step(engine, share(engine, "packed", 2), next_token())
    before = {f"model/{name}": full_tensor(p.detach()).clone() for name, p in engine.weights.items()}
    engine.export(folder)
    save_tensors(folder / "checkpoint", engine.tensors())
    only = {name: full_tensor(tensor) for name, tensor in engine.tensors(model_only=True).items()}
    after = {f"model/{name}": full_tensor(p.detach()).clone() for name, p in engine.weights.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.close()
    return before, only
