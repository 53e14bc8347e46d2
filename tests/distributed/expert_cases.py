"""What ranks run of models with experts, on either engine."""

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
from components.models.moe_config import MoELossConfig
from components.optimizers import AdamW
from tests.distributed.cases import LENGTHS, Step, next_token, share, spec
from tests.distributed.gradients import capture

STEPS = 3


@dataclass(frozen=True)
class Work:
    """What is trained, and how micro-batches are cut."""

    family: str
    layout: str = "packed"
    micro_batch: int = 1
    steps: int = STEPS
    terms: MoELossConfig = MoELossConfig()  # noqa: RUF009  frozen


@dataclass(frozen=True)
class Trained:
    first: Step
    curve: Tensor
    """``[steps, 2]``: loss and gradient norm."""
    results: list[StepResult]
    biases: dict[str, Tensor]


def make(work: Work, on: FSDP2 | Megatron) -> Any:
    return on.build(
        replace(spec(work.family), moe=work.terms),
        AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=1.0),
        EngineOptions(device="cpu", dtype=torch.float32),
    )


def run(on: FSDP2 | Megatron, work: Work, load: Path | None = None, folder: Path | None = None) -> Trained:
    """Some steps from the start or from ``load``; then a checkpoint and an export to ``folder``."""
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
    # Those that an update was made with are clipped.
    step = Step(*curve[0].tolist(), first) if results else Step(0.0, 0.0, {})
    unclipped = {name: gradient * max(1.0, step.grad_norm + 1e-6) for name, gradient in step.grads.items()}
    return Trained(replace(step, grads=unclipped), curve, results, biases)


@dataclass(frozen=True)
class OtherPasses:
    straight: tuple[float, ...]
    """Loss and metrics of a step."""
    undisturbed: tuple[float, ...]
    """Of the same after an evaluation, log-probabilities and an aborted step."""
    skipped_changes: float
    """Of biases, by a step that was skipped."""
    main: float
    """The loss of the step without the terms of routers."""
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
    """For ``plain_step``: what ``terms`` add to the loss, where every sequence is a micro-batch.

    The balance loss is by transformers' own function, layer by layer; DeepSeek's, whose scores are no
    softmax, by its definition.
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
    """Of one layer and one sequence; 1 where the load is even."""
    number, top_k = logits.shape[1], chosen.shape[1]
    if model.config.model_type != "deepseek_v3":
        found: Tensor = load_balancing_loss_func((logits,), number, top_k) / top_k
        return found
    shares = torch.bincount(chosen.reshape(-1), minlength=number) * number / chosen.numel()
    scores = logits.sigmoid()
    return (shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def read(point: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint but random streams, in one process."""
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(point).read_metadata().state_dict_metadata
    kept = [key for key in saved_keys(point) if not key.startswith("rng")]
    found = {key: torch.empty(stored[key].size, dtype=stored[key].properties.dtype) for key in kept}  # type: ignore[union-attr]
    load_tensors(point, found, together=False)
    return found
