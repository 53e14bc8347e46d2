"""Runs with Muon on both engines, on the ranks of a layout."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from components.adapters import LoRA
from components.checkpoint.dcp import save_tensors
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.optimizers import Muon, TorchClass, WeightGroup, muon_in_float32
from tests.distributed.cases import make_engine, next_token, share, step

MUON = Muon(lr=1e-2, adamw_lr=2e-3, max_grad_norm=1.0)
GROUPED = replace(MUON, groups=(WeightGroup("*.q_proj.*", lr=2e-2), WeightGroup("*norm*", weight_decay=0.1)))
ADAFACTOR = TorchClass(torch.optim.Adafactor, 1e-2, 0.1)
ADAPTER = LoRA(r=4, alpha=8, dropout=0.0, target_modules="all-linear")

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "groups": {"optimizer": GROUPED},
    "class": {"optimizer": ADAFACTOR},
    "built": {"optimizer": TorchClass(torch.optim.Adagrad, 1e-2, 0.1)},  # has its state before a step
    "elements": {"optimizer": TorchClass(torch.optim.RAdam, 1e-2, 0.1)},
    "lora": {"adapter": ADAPTER},
    "frozen": {"freeze": ("*embed_tokens*", "*layers.0.*")},
    "mtp": {"mtp_layers": 1},
}

Curve = list[tuple[float, float, int | None]]


def trained(on: FSDP2 | Megatron, family: str, kind: str, folder: Path, resume: Path | None = None) -> Curve:
    """Return loss, gradient norm and number of zeros of four steps, or of the last two from ``resume``.

    The state before the third step is saved in ``folder``. Newton-Schulz iterations are in float32.
    """
    with muon_in_float32():
        engine = make_engine(family, on=on, count_zeros=True, **{"optimizer": MUON} | OPTIONS[kind])
        curve = []
        if resume is not None:
            engine.load(resume)
        for number in range(0 if resume is None else 2, 4):
            if number == 2:
                save_tensors(folder, engine.tensors())
            result = step(engine, share(engine, "packed", 2, seed=number % 2), next_token())
            curve.append((result.loss, result.grad_norm, result.num_zeros))
        engine.close()
    return curve


@dataclass(frozen=True)
class Half:
    """The weights of a rank in a bf16 run."""

    mine: int
    """Number of master weights."""
    rounded: int
    """Number of those that bf16 would round, before the first step."""
    written: int
    """Number of those in the tensors of a checkpoint."""
    total: int
    """Number of all weights of the model."""
    held: bool
    """Whether the parameters are the rounded master weights after a step."""


def in_half(on: Megatron) -> Half:
    engine = make_engine("odd", on=on, dtype=torch.bfloat16, optimizer=MUON)
    masters = [weight.parameter.detach() for weight in engine.update.owned]
    rounded = sum(int((master != master.bfloat16()).sum()) for master in masters)
    step(engine, share(engine, "packed", 2), next_token())
    held = all(torch.equal(p, engine.update.read(p, "model").to(p.dtype)) for p in engine.blocks)
    written = sum(t.numel() for name, t in engine.tensors().items() if name.startswith("model/"))
    total = sum(parameter.numel() for parameter in engine.meta.parameters())
    engine.close()
    return Half(sum(master.numel() for master in masters), rounded, written, total, held)


def skipped_step(on: Megatron) -> bool:
    """Return whether a step whose loss is too high leaves the engine's tensors as they were."""
    engine = make_engine(on=on, optimizer=MUON)
    step(engine, share(engine, "packed", 2), next_token())
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    result = step(engine, share(engine, "packed", 2), next_token(), max_loss=0.0)
    after = engine.tensors()
    engine.close()
    same = all(torch.equal(before[name], after[name]) for name in before)
    return result.skipped and same and before.keys() == after.keys()
