"""Rank functions of test_engine.py."""

import math
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from components.adapters import LoRA
from components.checkpoint.dcp import save_tensors
from components.contracts.batch import IGNORE, Batch
from components.contracts.engine import StepResult
from components.contracts.errors import TrainingError
from components.contracts.loss import LossOutput, TokenStats
from components.engines.fsdp2 import FSDP2
from components.engines.fsdp2.mesh import full_tensor, local_shard
from components.engines.megatron import Megatron
from components.losses import NextToken
from components.optimizers import Optimizer
from tests.distributed.cases import Step, engine_step, make_engine, next_token, share, step

Layout = FSDP2 | Megatron


def snapshot(engine: Any) -> dict[str, Tensor]:
    """Copy all weights and optimizer values; with Megatron, only the shards of this rank."""
    if hasattr(engine, "update"):
        return held(engine)
    tensors = {name: full_tensor(p.detach()).clone() for name, p in engine.weights.items()}
    for name, parameter in engine.weights.items():
        shards = engine.optimizer
        for key, value in shards.optimizer.state[shards.shards[parameter]].items():
            whole = value if value.ndim == 0 else full_tensor(shards.moment(key, parameter))
            tensors[f"{key}/{name}"] = whole.clone()
    return tensors


def held(engine: Any) -> dict[str, Tensor]:
    update = engine.update
    update.make_moments()
    engine.gather_parameters()
    tensors = {"step": torch.tensor(update.step)}
    for parameter, members in engine.blocks.items():
        name = "+".join(member.name for member in members)
        tensors[name] = parameter.detach().clone()
        for kind in ("model", *update.moments):
            tensors[f"{kind}/{name}"] = update.read(parameter, kind).clone()
    return tensors


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True)
class FailsAt(NextToken):
    """A loss that raises in its call number ``calls``."""

    calls: int = 2

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        object.__setattr__(self, "calls", self.calls - 1)
        if self.calls == 0:
            raise RuntimeError("a bad micro-batch")
        return super().__call__(stats, batch)


@dataclass(frozen=True)
class OutOfMemory(FailsAt):
    """A loss that raises an out-of-memory error in its call number ``calls``."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        try:
            return super().__call__(stats, batch)
        except RuntimeError as error:
            raise torch.OutOfMemoryError("CUDA out of memory.") from error


@dataclass(frozen=True)
class NotFinite(NextToken):
    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output = super().__call__(stats, batch)
        return LossOutput({"loss": output.terms["loss"] * math.nan})


def failing(of: type[NextToken], **values: Any) -> NextToken:
    return of(kind="chat", **values)


def two_steps(on: Layout) -> tuple[StepResult, dict[str, Tensor]]:
    engine, loss = make_engine(on=on), next_token()
    step(engine, share(engine, "packed", 2), loss)
    result = step(engine, share(engine, "packed", 2, seed=1), loss)
    after = snapshot(engine)
    engine.close()
    return result, after


def state_of_a_trial(on: Layout, optimizer: Optimizer) -> tuple[int, int, bool]:
    """Return the elements of the optimizer's state in a trial before the first step, and after the step.

    Also return whether the trial changed the step.
    """
    engine, loss = make_engine(on=on, optimizer=optimizer), next_token()
    expected = step(engine, share(engine, "packed", 2), loss)
    after = state_size(engine)
    engine.close()
    engine = make_engine(on=on, optimizer=optimizer)
    with engine.allocated_optimizer_state():
        within = state_size(engine)
        engine.begin_train_step(batches := share(engine, "packed", 2), loss)
        engine.train_microbatches(batches, loss, last=True)
        engine.abort_train_step()
    changed = step(engine, share(engine, "packed", 2), loss) != expected or state_size(engine) != after
    engine.close()
    return within, after, changed


def loaded_for_evaluation(on: Layout, optimizer: Optimizer, folder: Path) -> tuple[bool, int]:
    """Evaluate an engine that has taken two steps, and one that has loaded only its weights.

    After one step, schedule-free AdamW's average would be the trained weights.
    Return whether the results are the same, and the elements of the second engine's optimizer state.
    """
    engine, loss = make_engine(on=on, optimizer=optimizer), next_token()
    first = engine.evaluate([share(engine, "packed", 2)], loss)
    for _ in range(2):
        step(engine, share(engine, "packed", 2), loss, lr=1e-1)
    trained = engine.evaluate([share(engine, "packed", 2)], loss)
    save_tensors(folder, engine.tensors())
    engine.close()
    engine = make_engine(on=on, optimizer=optimizer)
    engine.load(folder, model_only=True)
    found, size = engine.evaluate([share(engine, "packed", 2)], loss), state_size(engine)
    engine.close()
    return found == trained != first, size


def state_size(engine: Any) -> int:
    """Return the number of elements of the tensors in the states of this rank's optimizers."""
    of_engine = engine.update if hasattr(engine, "update") else engine.optimizer
    members = of_engine.members.values() if hasattr(of_engine, "members") else ()
    found = [inner for member in members for inner in member.inner] or [of_engine.optimizer]
    states = [state for optimizer in found if optimizer for state in optimizer.state.values()]
    return sum(v.numel() for state in states for v in state.values() if isinstance(v, Tensor) and v.ndim)


def weights_after_the_end(on: Layout, adapter: LoRA | None) -> tuple[int, int]:
    """Return the number of parameters of an engine that has taken a step, and how many outlive its end."""
    engine = make_engine(on=on, adapter=adapter, reference="adapter_off" if adapter else "frozen")
    step(engine, share(engine, "packed", 2), next_token())
    alive = references(engine)
    engine.close()
    return len(alive), sum(reference() is not None for reference in alive)


def references(engine: Any) -> list[Any]:
    """Return weak references to all parameters of the trained and the reference model."""
    models = [getattr(engine, name, None) for name in ("scorer", "chunks", "reference")]
    chunks = [chunk for model in models for chunk in (model if isinstance(model, list) else [model]) if chunk]
    return [weakref.ref(parameter) for chunk in chunks for parameter in chunk.parameters()]


def largest_rank(on: Layout) -> float:
    """Return the maximum over ranks of 10 + the rank."""
    engine = make_engine(on=on)
    found = engine.max_over_ranks(10.0 + dist.get_rank())
    engine.close()
    return found


def words_where_memory_ends(on: Layout, calls: int) -> tuple[list[str], int]:
    """Return the errors of a train step and an evaluation out of memory, and the number of micro-batches."""
    engine, said = make_engine(on=on), []
    batches = share(engine, "packed", 1)
    evaluation = failing(OutOfMemory, calls=calls)
    for train in (True, False):
        try:
            if train:
                engine.begin_train_step()
                engine.train_microbatches(batches, failing(OutOfMemory, calls=calls), last=True)
            else:
                engine.evaluate([batches], evaluation)
        except TrainingError as error:
            said.append(str(error))
        engine.abort_train_step()
    engine.close()
    return said, len(batches)


def two_steps_and_an_error(on: Layout) -> tuple[bool, StepResult, dict[str, Tensor]]:
    """Run ``two_steps``, but first try the second step with a loss that raises in its second micro-batch."""
    engine, loss = make_engine(on=on), next_token()
    step(engine, share(engine, "packed", 2), loss)
    before, second = snapshot(engine), share(engine, "packed", 2, seed=1)
    engine.begin_train_step()
    try:
        engine.train_microbatches(second, failing(FailsAt), last=True)
    except RuntimeError:
        engine.abort_train_step()
    engine.abort_train_step()
    unchanged = identical(before, snapshot(engine))
    result, after = step(engine, second, loss), snapshot(engine)
    engine.close()
    return unchanged, result, after


def two_steps_and_an_abort(on: Layout) -> tuple[bool, StepResult, dict[str, Tensor]]:
    """Run ``two_steps``, but first compute and reduce the whole second step and abort it."""
    engine, loss = make_engine(on=on), next_token()
    step(engine, share(engine, "packed", 2), loss)
    before, second = snapshot(engine), share(engine, "packed", 2, seed=1)
    engine.begin_train_step()
    engine.train_microbatches(second, loss, last=True)
    engine.abort_train_step()
    unchanged = identical(before, snapshot(engine))
    result, after = step(engine, second, loss), snapshot(engine)
    engine.close()
    return unchanged, result, after


def skip_when_one_rank_is_not_finite(on: Layout, bad_rank: int) -> tuple[bool, bool, bool]:
    """Return whether the step is skipped, nothing has changed, and the next step is taken."""
    engine, loss = make_engine(on=on), next_token()
    step(engine, share(engine, "packed", 2), loss)
    before = snapshot(engine)
    bad = failing(NotFinite) if engine.dp_rank == bad_rank else loss
    result = step(engine, share(engine, "packed", 2), bad)
    unchanged = identical(before, snapshot(engine))
    after = step(engine, share(engine, "packed", 2), loss)
    engine.close()
    return result.skipped, unchanged, not after.skipped


def skip_when_the_loss_is_too_high(on: Layout) -> tuple[bool, bool, bool]:
    """Return whether the step is skipped, nothing has changed, and a loss equal to the limit is accepted."""
    engine, loss = make_engine(on=on), next_token()
    first = step(engine, share(engine, "packed", 2), loss)
    before, batches = snapshot(engine), share(engine, "packed", 2)
    high = step(engine, batches, loss, max_loss=first.loss / 2)
    unchanged = identical(before, snapshot(engine))
    allowed = step(engine, batches, loss, max_loss=first.loss)  # the samples are those of the first step
    engine.close()
    return high.skipped, unchanged, not allowed.skipped


def streamed(on: Layout, calls: bool) -> StepResult:
    """Return one step; with ``calls``, without counts and with one call for each micro-batch."""
    engine, loss = make_engine(on=on), next_token()
    batches = share(engine, "packed", 1)
    if not calls:
        result = step(engine, batches, loss)
    else:
        engine.begin_train_step()
        for batch in batches:
            engine.train_microbatches([batch], loss)
        result = engine.finish_train_step(1e-3)
    engine.close()
    return result


def curve(
    on: Layout,
    dtype: torch.dtype,
    steps: int = 5,
    optimizer: Optimizer | None = None,
    family: str = "qwen3",
) -> list[tuple[float, float]]:
    """Return (loss, grad_norm) of each step. Gradients are clipped at 1."""
    engine, loss = (
        make_engine(family, on=on, optimizer=optimizer, dtype=dtype, max_grad_norm=1.0),
        next_token(),
    )
    results = [step(engine, share(engine, "packed", 2, seed=s % 2), loss) for s in range(steps)]
    engine.close()
    return [(r.loss, r.grad_norm) for r in results]


def evaluate(on: Layout) -> tuple[float, float]:
    """Return the evaluation loss and the train loss on the same sequences."""
    engine, loss = make_engine(on=on), next_token()
    means = engine.evaluate([share(engine, "padded", 2)], loss)
    result = step(engine, share(engine, "padded", 2), loss)
    engine.close()
    return means["loss"], result.loss


def reference_logps(on: Layout) -> bool:
    """Return whether the reference stays equal to the initial policy while the policy changes."""
    engine = make_engine(on=on, reference="frozen")
    batches = share(engine, "packed", 2)
    start = engine.logps(batches)
    for _ in range(2):
        step(engine, batches, next_token())
    reference, moved = engine.logps(batches, reference=True), engine.logps(batches)
    engine.close()
    same = all(torch.equal(a, b) for a, b in zip(start, reference, strict=True))
    return same and not any(torch.equal(a, b) for a, b in zip(start, moved, strict=True))


def bf16_by_sequence(on: Layout, dtype: torch.dtype) -> StepResult:
    engine, loss = make_engine(on=on, dtype=dtype), next_token("sequence")
    result = step(engine, share(engine, "packed", 2), loss)
    engine.close()
    return result


def logps_around_an_update(on: Layout) -> tuple[Tensor, Tensor]:
    """Return log-probabilities after an update that followed another forward pass, and the expected ones."""
    answers = []
    engine, loss = make_engine(on=on), next_token()
    batches = share(engine, "packed", 4)
    engine.begin_train_step()
    engine.train_microbatches(batches, loss)
    engine.logps(batches)
    engine.finish_train_step(1e-2)
    answers.append(engine.logps(batches)[0])
    # A backward pass frees all gathered weights, so that the updated ones are gathered.
    engine.begin_train_step()
    engine.train_microbatches(batches, loss)
    engine.abort_train_step()
    answers.append(engine.logps(batches)[0])
    engine.close()
    return answers[0], answers[1]


def zeros_in_grad(on: Layout) -> int | None:
    engine = make_engine("llama", on=on, count_zeros=True)
    result = step(engine, share(engine, "packed", 2), next_token())
    engine.close()
    return result.num_zeros


def call_out_of_order(on: Layout) -> None:
    engine = make_engine(on=on)
    with pytest.raises(AssertionError, match="without begin"):
        engine.finish_train_step(1e-3)
    with pytest.raises(AssertionError, match="outside"):
        engine.train_microbatches(share(engine, "packed", 8), next_token())
    engine.begin_train_step()
    with pytest.raises(AssertionError, match="neither finished nor aborted"):
        engine.begin_train_step()
    engine.abort_train_step()
    engine.close()


def one_step(on: FSDP2, family: str, layout: str, micro_batch: int = 1) -> Step:
    return engine_step(family, layout, micro_batch, next_token(), on)


def shared_rows(on: FSDP2, family: str) -> dict[str, Tensor]:
    """Return log-probabilities, losses and norms of two steps, whose losses need every label statistic.

    Some micro-batches are padded, without tokens, or shorter than the number of ranks.
    """
    engine, found = make_engine(family, on=on), {}
    every = NextToken(kind="chat", normalize="sequence", label_smoothing=0.1, z_loss=1e-2)
    batches = [*share(engine, "packed", 3), *share(engine, "padded", 3), tiny_batch(1), tiny_batch(0)]
    for number, logps in enumerate(engine.logps(batches)):
        found[f"logps {number}"] = logps
    for loss in (next_token("sequence"), every):
        result = step(engine, batches, loss)
        found[f"smoothing {loss.label_smoothing}"] = torch.tensor([result.loss, result.grad_norm])
    engine.close()
    return found


def tiny_batch(length: int) -> Batch:
    """Return one packed sequence of one token with its label, or of no token."""
    one, ends = torch.ones(1, 1, dtype=torch.int64), torch.tensor([0, 1], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    return Batch(one, one if length else one * IGNORE, one * 0, lengths, cu_seqlens=ends, max_seqlen=1)


def export(on: Layout, path: Path) -> None:
    engine = make_engine("llama", on=on)
    engine.export(path)
    engine.close()


def description(on: Layout) -> tuple[dict[str, Any], int]:
    """Return ``describe()`` and the number of elements of the weights that this rank holds."""
    engine = make_engine("llama", on=on)
    described = engine.describe()
    held = sum(local_shard(parameter).numel() for parameter in engine.weights.values())
    engine.close()
    return described, held
