"""Rank functions for adapters on the Megatron engine, and the same with transformers, peft and torch."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.adapters.peft_export import peft_config
from components.checkpoint.dcp import save_tensors
from components.contracts.batch import IGNORE, Batch
from components.contracts.engine import Reference
from components.contracts.loss import Loss
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.losses import DPO
from components.models import WeightSource
from components.models.initialize import seeded
from tests.distributed.adapter_cases import trained
from tests.distributed.cases import make_engine, next_token, plain_model, sequences, share, spec, step
from tests.distributed.gradients import capture

BETA = 0.5


@dataclass(frozen=True)
class Warm(LoRA):
    """An adapter whose B is not zero. With B = 0, A has no gradient and the logits do not change."""

    def weights(
        self,
        model: PreTrainedModel,
        seed: int,
        base: WeightSource,  # noqa: ARG002
        *,
        restores: bool = False,  # noqa: ARG002
    ) -> WeightSource:
        shapes = self.shapes(model)

        def draw(name: str, index: tuple[slice, ...] = ()) -> Tensor:
            with seeded(seed, name):
                return 0.2 * torch.randn(shapes[name])[index]

        return draw


def warm(target: Any = "all-linear", **settings: Any) -> Warm:
    return Warm(r=3, alpha=4.0, target_modules=target, **settings)


@dataclass
class Run:
    """Loss, gradient norm and number of zero gradients of each step, and the gradients of the first."""

    curve: list[tuple[float, float]]
    grads: dict[str, Tensor]
    zeros: list[int | None] = field(default_factory=list)


def batches(engine: Any, loss: Loss, seed: int) -> list[Batch]:
    """Return this rank's micro-batches. For a preference loss, neighbouring sequences form a pair."""
    made = share(engine, "packed", 2, seed)
    if loss.kind != "preference":
        return made
    paired = [replace(batch, pair_index=torch.arange(batch.num_sequences)) for batch in made]
    return list(loss.prepare(paired, engine))


def run_on(engine: Any, loss: Loss, steps: int, lr: float = 1e-3) -> Run:
    grads = capture(engine)
    made = Run([], {})
    for number in range(steps):
        result = step(engine, batches(engine, loss, number % 2), loss, lr)
        made.curve.append((result.loss, result.grad_norm))
        made.zeros.append(result.num_zeros)
        made.grads = made.grads or dict(grads)
    return made


def train(on: FSDP2 | Megatron, family: str, adapter: LoRA, stage: str = "sft", steps: int = 5) -> Run:
    reference: Reference = "adapter_off" if stage == "dpo" else "none"
    engine = make_engine(family, on=on, adapter=adapter, reference=reference)
    loss: Loss = DPO(beta=BETA, label_smoothing=0.0) if stage == "dpo" else next_token()
    made = run_on(engine, loss, steps, 1e-5 if stage == "dpo" else 1e-3)
    engine.close()
    return made


@dataclass
class Life:
    """State of a rank after its engine has trained, saved and exported an adapter."""

    reference: list[Tensor]
    """Sum of log-probabilities of each sequence under the reference; empty except on the last stage."""
    trained: list[Tensor]
    held: dict[str, tuple[Any, Tensor]]
    """Index in the full tensor, and the values, of each parameter of this rank."""
    elements: dict[str, int]
    """Numbers of elements: trained on all ranks and on this rank, in its gradient buffers, in its moments."""


def live(on: Megatron, adapter: LoRA, folder: Path) -> Life:
    engine = make_engine("qwen2_four", on=on, adapter=adapter, reference="adapter_off")
    run_on(engine, next_token(), 2)
    save_tensors(folder / "checkpoint", engine.tensors())
    engine.export(folder / "export")
    reference, trained = sums(engine, reference=True), sums(engine, reference=False)
    held = {m.name: (str(m.index), p.detach().clone()) for p, (m,) in engine.blocks.items()}
    elements = {
        "described": engine.describe()["trained_parameters"],
        "trained": sum(parameter.numel() for parameter in engine.blocks),
        "buffers": sum(b.numel_unpadded for chunk in engine.chunks for b in all_buckets(chunk)),
        "state": sum(
            state[kind].numel()
            for member in engine.update.members.values()
            for inner in member.inner
            for state in inner.state.values()
            for kind in engine.update.moments
        ),
    }
    engine.close()
    return Life(reference, trained, held, elements)


def all_buckets(chunk: Any) -> list[Any]:
    return [bucket for buffer in chunk.buffers for bucket in buffer.buckets]


def sums(engine: Any, *, reference: bool) -> list[Tensor]:
    """Return the sum of log-probabilities of each sequence in the order of this rank's share."""
    made = share(engine, "packed", 2)
    answer = engine.logps(made, reference=reference)
    if answer is None:
        return []
    return [value for b, logps in zip(made, answer, strict=True) for value in b.sum_per_sequence(logps)]


def resumed_with_dropout(on: Megatron, folder: Path) -> dict[str, Tensor]:
    """Return the values on this rank of the matrices A that its tp ranks share, after a resume and a step."""
    engine = make_engine("qwen2_four", on=on, adapter=warm(dropout=0.5))
    engine.load(folder)
    run_on(engine, next_token(), 1)
    held = {m.name: (m.dim, p.detach().clone()) for p, (m,) in engine.blocks.items()}
    engine.close()
    return {name: value for name, (dim, value) in held.items() if dim is None and "lora_A" in name}


def save_and_go_on(on: FSDP2 | Megatron, adapter: LoRA, folder: Path) -> list[tuple[float, float]]:
    engine = make_engine("qwen2_four", on=on, adapter=adapter)
    run_on(engine, next_token(), 2)
    save_tensors(folder / "checkpoint", engine.tensors())
    engine.export(folder / "export")
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after


def go_on(on: FSDP2 | Megatron, adapter: LoRA, folder: Path) -> list[tuple[float, float]]:
    """Return the two steps that follow the checkpoint in ``folder``."""
    engine = make_engine("qwen2_four", on=on, adapter=adapter)
    engine.load(folder / "checkpoint")
    after = run_on(engine, next_token(), 2).curve
    engine.close()
    return after


def with_dropout(on: Megatron, adapter: LoRA) -> tuple[dict[str, tuple[Any, Tensor]], list[float]]:
    """Return this rank's parameters after three steps, and losses of the first step and two evaluations."""
    engine = make_engine("qwen2_four", on=on, adapter=adapter, reference="adapter_off")
    loss = DPO(beta=BETA, label_smoothing=0.0)
    losses = run_on(engine, next_token(), 3).curve[0][:1]
    paired = [replace(b, pair_index=torch.arange(b.num_sequences)) for b in share(engine, "packed", 2)]
    found = [engine.evaluate([paired, paired], loss)["loss"] for _ in range(2)]
    held = {m.name: (str(m.index), p.detach().clone()) for p, (m,) in engine.blocks.items()}
    engine.close()
    return held, [*losses, *found]


def train_frozen(
    on: Megatron, family: str, patterns: tuple[str, ...], train_only: tuple[str, ...] = ()
) -> Run:
    engine = make_engine(family, on=on, freeze=patterns, train_only=train_only, count_zeros=True)
    made = run_on(engine, next_token(), 3)
    engine.close()
    return made


# ---- plain transformers, peft and torch


def plain_adapted(family: str, adapter: LoRA) -> Any:
    """Return peft's model with the initial values of the engines."""
    description = spec(family)
    meta = description.build(description.config())
    model = get_peft_model(plain_model(family), peft_config(adapter, meta))  # type: ignore[arg-type]
    values = adapter.weights(meta, 0, description.weights(0))
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(values(name))
    return model


def plain_train(family: str, adapter: LoRA, stage: str = "sft", steps: int = 5) -> Run:
    return plain_run(plain_adapted(family, adapter), stage, steps)


def plain_frozen(family: str, patterns: tuple[str, ...]) -> Run:
    model = plain_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in patterns))
    return plain_run(model, "sft", 3)


def plain_run(model: Any, stage: str, steps: int) -> Run:
    weights = trained(model)
    groups = [
        {"params": [p for p in weights.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in weights.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-5 if stage == "dpo" else 1e-3, betas=(0.9, 0.95))
    made = Run([], {})
    for number in range(steps):
        loss = plain_dpo(model, number % 2) if stage == "dpo" else plain_sft(model, number % 2)
        optimizer.zero_grad()
        loss.backward()
        grads = {name: parameter.grad.clone() for name, parameter in weights.items()}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        made.curve.append((loss.item(), norm.item()))
        made.zeros.append(sum(int((grad == 0).sum()) for grad in grads.values()))
        made.grads = made.grads or grads
        optimizer.step()
    return made


def plain_sums(model: Any, seed: int) -> list[Tensor]:
    """Return the sum of the log-probabilities of the labels of each sequence."""
    found = []
    for row in sequences(seed):
        logits = model(input_ids=row.ids[None], use_cache=False).logits[0]
        found.append(-F.cross_entropy(logits, row.labels, ignore_index=IGNORE, reduction="sum"))
    return found


def plain_sft(model: Any, seed: int) -> Tensor:
    count = sum(int((row.labels != IGNORE).sum()) for row in sequences(seed))
    return -torch.stack(plain_sums(model, seed)).sum() / count


def plain_dpo(model: Any, seed: int) -> Tensor:
    with torch.no_grad(), model.disable_adapter():
        reference = torch.stack(plain_sums(model, seed))
    ratios = torch.stack(plain_sums(model, seed)) - reference
    return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()
