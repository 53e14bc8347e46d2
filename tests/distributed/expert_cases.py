"""Rank functions of tests of MoE models on both engines."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from components.checkpoint.dcp import load_tensors, save_tensors, saved_keys
from components.contracts.batch import Batch
from components.contracts.engine import EngineOptions, StepResult
from components.engines.fsdp2 import FSDP2
from components.engines.megatron import Megatron
from components.models.moe_loss_config import MoELossConfig
from components.optimizers import AdamW
from tests.distributed.cases import LENGTHS, Step, next_token, share, spec
from tests.distributed.gradients import capture

STEPS = 3


@dataclass(frozen=True)
class Work:
    """A model, its router losses and its micro-batches."""

    family: str
    layout: str = "packed"
    micro_batch: int = 1
    steps: int = STEPS
    terms: MoELossConfig = MoELossConfig()  # noqa: RUF009  frozen


@dataclass(frozen=True)
class Trained:
    first: Step
    curve: Tensor
    """Loss and gradient norm of each step, ``[steps, 2]``."""
    results: list[StepResult]
    biases: dict[str, Tensor]


def make(work: Work, on: FSDP2 | Megatron) -> Any:
    return on.build(
        replace(spec(work.family), moe=work.terms),
        AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0),
        EngineOptions(device="cpu", dtype=torch.float32),
    )


def reduces_in_place(on: FSDP2) -> bool:
    engine = make(Work("qwen3_moe_mixed"), on)
    found = engine.scorer.in_place_reduction is not None
    engine.close()
    return found


def run(on: FSDP2 | Megatron, work: Work, load: Path | None = None, folder: Path | None = None) -> Trained:
    """Train from the initial weights or from ``load``, then save a checkpoint and an export to ``folder``."""
    engine = make(work, on)
    if load is not None:
        engine.load(load)
    grads, results, first = capture(engine), [], {}
    for number in range(work.steps):
        results.append(one_step(engine, work, number % 2))
        first = first or dict(grads)
    if folder is not None:
        save_tensors(folder / "point", engine.tensors())
        engine.export(folder / "export")
    biases = {name: bias.clone() for name, bias in getattr(engine, "biases", {}).items()}
    engine.close()
    curve = torch.tensor([(r.loss, r.grad_norm) for r in results], dtype=torch.float64)
    # The update's gradients are clipped.
    step = Step(*curve[0].tolist(), first) if results else Step(0.0, 0.0, {})
    unclipped = {name: gradient * max(1.0, step.grad_norm + 1e-6) for name, gradient in step.grads.items()}
    return Trained(replace(step, grads=unclipped), curve, results, biases)


@dataclass(frozen=True)
class OtherPasses:
    straight: tuple[float, ...]
    """Loss and metrics of a step that follows no other pass."""
    undisturbed: tuple[float, ...]
    """Loss and metrics of the same step after and between evaluations, reference passes and an abort."""
    skipped_changes: float
    """Sum of the absolute changes of router biases by a skipped step."""
    main: float
    """Loss of the step without the router losses."""
    evaluated: float


def other_passes(on: FSDP2, work: Work) -> OtherPasses:
    loss = next_token()

    def begin() -> tuple[Any, list[Batch]]:
        engine = make(work, on)
        return engine, share(engine, work.layout, work.micro_batch)

    engine, batches = begin()
    evaluated = engine.evaluate([batches], loss)["loss"]
    engine.logps(batches)
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches[:1], loss)
    engine.abort_train_step()
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches[:1], loss)
    engine.evaluate([batches], loss)
    engine.logps(batches)
    engine.train_microbatches(batches[1:], loss)
    skipped = engine.finish_train_step(1e-3, max_loss=0.1)
    assert skipped.skipped
    changes = sum(bias.abs().sum().item() for bias in engine.biases.values())
    engine.close()
    engine, _ = begin()
    straight = one_step(engine, work, 0)
    engine.close()
    main = straight.loss - straight.metrics["aux_loss"] - straight.metrics["router_z_loss"]
    both = [(r.loss, *r.metrics.values()) for r in (straight, skipped)]
    return OtherPasses(*both, changes, main, evaluated)


def one_step(engine: Any, work: Work, seed: int) -> StepResult:
    loss, batches = next_token(), share(engine, work.layout, work.micro_batch, seed)
    engine.begin_train_step(batches, loss)
    engine.train_microbatches(batches, loss, last=True)
    result: StepResult = engine.finish_train_step(1e-3)
    return result


def watch_routers(terms: MoELossConfig, model: nn.Module) -> Callable[[], Tensor]:
    """Return a ``watch`` result for ``plain_step``: the router losses, with one sequence per micro-batch.

    The load balancing loss is computed layer by layer with transformers' function. That of DeepSeek, whose
    scores are not a softmax, follows its definition.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    for name, gate in model.named_modules():
        if name.endswith(".mlp.gate"):
            gate.register_forward_hook(lambda _, __, routed: seen.append((routed[0], routed[2])))

    def added() -> Tensor:
        total = torch.zeros(())
        for logits, chosen in seen:
            weight = len(logits) / sum(LENGTHS) if terms.aux_loss == "switch" else 1 / len(LENGTHS)
            total = total + terms.aux_loss_coef * weight * balance(model, logits, chosen)
            total = total + terms.z_loss_coef * logits.logsumexp(-1).square().sum() / sum(LENGTHS)
        seen.clear()
        return total

    return added


def balance(model: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the load balancing loss of one layer and one sequence; 1 for an even load."""
    number, top_k = logits.shape[1], chosen.shape[1]
    if model.config.model_type != "deepseek_v3":
        found: Tensor = load_balancing_loss_func((logits,), number, top_k) / top_k
        return found
    shares = torch.bincount(chosen.reshape(-1), minlength=number) * number / chosen.numel()
    scores = logits.sigmoid()
    return (shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def read(point: Path) -> dict[str, Tensor]:
    """Read a checkpoint except its random generator states in one process."""
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(point).read_metadata().state_dict_metadata
    kept = [key for key in saved_keys(point) if not key.startswith("rng")]
    found = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in kept}  # type: ignore[union-attr]
    load_tensors(point, found, together=False)
    return found
