"""Rank functions of test_fp16_steps.py, and the same steps with ``torch.amp.GradScaler``."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.contracts.batch import IGNORE
from components.contracts.engine import LossScaling
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.optimizers import AdamW
from tests.distributed.cases import make_engine, next_token, plain_model, sequences, share, step
from tests.distributed.gradients import capture

STEPS = 10
FIRST_SEED = 600
"""Seed of the data of the first step. With it, in fp32, the largest gradient of a weight or layer is never
closer than 10 % to the largest number of fp16, so that rounding decides no skip. No token is so close to a
tie between two experts that the layouts of test_fp16_steps.py send it to different ones."""
SCALING = LossScaling(initial=2.0**20, growth_interval=3)
"""The first steps overflow. Then the scale is doubled after three steps, which leads to another overflow."""
OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0)


@dataclass(frozen=True)
class Scaled:
    """One step: its loss, its gradient norm, the scale it was taken with, and whether it was skipped."""

    loss: float
    grad_norm: float
    scale: float
    skipped: bool


def curves(layouts: Sequence[FSDP2 | Megatron], family: str) -> list[list[Scaled]]:
    """Return the steps of every layout in fp16."""
    return [curve(on, family) for on in layouts]


def curve(on: FSDP2 | Megatron, family: str, scaling: LossScaling | None = SCALING) -> list[Scaled]:
    dtype = torch.float32 if scaling is None else torch.float16
    engine = make_engine(family, on=on, optimizer=OPTIMIZER, dtype=dtype, loss_scaling=scaling)
    steps = []
    for number in range(STEPS):
        found = step(engine, share(engine, "packed", 2, seed=FIRST_SEED + number), next_token())
        assert found.overflow == found.skipped
        scale = found.metrics.get("loss_scale", 1.0)
        steps.append(Scaled(found.loss, found.grad_norm, scale, found.skipped))
    engine.close()
    return steps


def gradients_of(on: FSDP2 | Megatron, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of a first step, with a loss scale in fp16."""
    scaling = LossScaling(4096.0, 2000) if dtype == torch.float16 else None
    engine = make_engine(on=on, dtype=dtype, loss_scaling=scaling, **options)
    grads = capture(engine)
    assert not step(engine, share(engine, "packed", 2), next_token()).skipped
    engine.close()
    return grads


def torch_curve(family: str) -> list[Scaled]:
    """Return the steps of a plain loop: transformers in fp16, fp32 master weights, and torch's scaler."""
    masters = plain_model(family)
    model: Any = copy.deepcopy(masters).half()
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.1
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALING.initial, growth_interval=SCALING.growth_interval)
    steps = []
    for number in range(STEPS):
        scale = scaler.get_scale()
        loss = backward(model, masters, scaler, FIRST_SEED + number)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(masters.parameters(), 1.0).item()
        before = [p.detach().clone() for p in masters.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = all(map(torch.equal, before, masters.parameters()))
        steps.append(Scaled(loss, norm, scale, skipped))
        model.load_state_dict(masters.state_dict())
    return steps


def backward(model: Any, masters: Any, scaler: torch.amp.GradScaler, seed: int) -> float:
    """Add the gradients of the scaled mean loss to ``masters``, two sequences at a time; return the mean."""
    rows = sequences(seed)
    count, total = sum(int((row.labels != IGNORE).sum()) for row in rows), 0.0
    for first in range(0, len(rows), 2):
        both = [
            F.cross_entropy(
                model(input_ids=row.ids[None], use_cache=False).logits[0].float(),
                row.labels,
                ignore_index=IGNORE,
                reduction="sum",
            )
            for row in rows[first : first + 2]
        ]
        mean = torch.stack(both).sum() / count
        scaler.scale(mean).backward()
        total += mean.item()
        for master, half in zip(masters.parameters(), model.parameters(), strict=True):
            part = half.grad.float()
            master.grad = part if master.grad is None else master.grad + part
            half.grad = None
    return total
