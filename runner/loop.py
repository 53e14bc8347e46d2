"""The training loop, the same for every engine, loss and kind of data.

for every global batch:
    microbatches = loss.prepare(data.microbatches(step), engine)
    engine.begin_train_step(counts of the labels)
    engine.train_microbatches(microbatches, loss, last=True)
    engine.finish_train_step(lr)
    log, evaluate, save where due
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.checkpoint import CheckpointPolicy
from runner.errors import TrainingError
from runner.profiler import Profiler
from runner.protocols import Batch, DataLoader, Engine, Loss
from runner.reporter import Reporter
from runner.schema import RunConfig
from runner.state import TrainState


@dataclass(frozen=True)
class Training:
    """Everything the loop is wired to."""

    engine: Engine
    loss: Loss
    train_data: DataLoader
    eval_data: DataLoader | None
    lr: Callable[[int], float]
    checkpoints: CheckpointPolicy
    reporter: Reporter
    profiler: Profiler
    state: TrainState
    run: RunConfig


def train(t: Training) -> None:
    """Runs from ``t.state.step`` to the last step of the data; every rank calls it."""
    last = t.train_data.num_steps
    while t.state.step < last:
        with t.profiler.step(t.state.step + 1):
            train_step(t)
        step = t.state.step
        if step == last or every(t.run.eval_every, step):
            evaluate(t)
        if step == last or every(t.run.save_every, step) or epoch_ended(t, step):
            t.checkpoints.save(t.engine, t.state)


def train_step(t: Training) -> None:
    """One optimizer step on global batch ``t.state.step``."""
    began, step = time.perf_counter(), t.state.step
    microbatches = t.loss.prepare(t.train_data.microbatches(step), t.engine)
    t.engine.begin_train_step(total_counts(t.loss, microbatches))
    t.engine.train_microbatches(microbatches, t.loss, last=True)
    result = t.engine.finish_train_step(t.lr(step))
    stats = t.train_data.stats(step)
    t.state.advance(num_samples=stats.num_samples, num_tokens=stats.num_tokens, skipped=result.skipped)
    t.reporter.step(t.state, stats, result, lr=t.lr(step), seconds=time.perf_counter() - began)
    if t.state.skipped_in_a_row >= t.run.max_skipped_steps:
        raise TrainingError(
            f"step {t.state.step}: loss or gradient not finite {t.state.skipped_in_a_row} steps in a row "
            f"(run.max_skipped_steps); lower optimizer.lr, or look at the data of these steps."
        )


def evaluate(t: Training) -> None:
    """Sums and counts over the whole evaluation set."""
    if t.eval_data is None:
        return
    batches = (t.eval_data.microbatches(step) for step in range(t.eval_data.num_steps))
    t.reporter.evaluation(t.state, t.engine.evaluate(batches, t.loss))


def total_counts(loss: Loss, microbatches: Sequence[Batch]) -> dict[str, int]:
    """Per term, over this rank's micro-batches."""
    counts = [loss.counts(batch) for batch in microbatches]
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def every(cadence: int, step: int) -> bool:
    return cadence > 0 and step % cadence == 0


def epoch_ended(t: Training, step: int) -> bool:
    """Whether ``step`` completed an epoch after which ``run.save_epochs`` asks for a checkpoint."""
    done = int(t.train_data.epoch(step))
    return done > int(t.train_data.epoch(step - 1)) and every(t.run.save_epochs, done)
