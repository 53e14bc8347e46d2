"""The training loop, the same for every engine, loss and kind of data.

for every global batch:
    microbatches = loss.prepare(data.microbatches(step), engine)
    engine.begin_train_step(microbatches, loss)
    engine.train_microbatches(microbatches, loss, last=True)
    engine.finish_train_step(lr)
    log, evaluate and save if due; leave the loop if a stop was requested

Hooks observe these calls, and may request an evaluation, a checkpoint or the end of the training.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from components.checkpoint import CheckpointManager
from components.contracts.batch import Batch
from components.contracts.data import DataLoader
from components.contracts.engine import Engine
from components.contracts.errors import StepOutOfMemory
from components.contracts.loss import Loss
from components.engines.shared.oom import naming_step
from runner.config.run_config import CheckpointConfig, RunConfig, every
from runner.records.run_record import Stopped
from runner.training.hooks import Hooks
from runner.training.metrics import MetricsReporter
from runner.training.prefetch import Prefetched
from runner.training.profiler import Profiler
from runner.training.state import TrainState
from runner.training.stop import StopPolicy
from runner.training.watchdog import Watchdog

log = logging.getLogger("runner")


class TrialOutOfMemory(StepOutOfMemory):
    """Error raised if the trial step runs out of memory."""


@dataclass(frozen=True)
class TrainContext:
    """The arguments of the training loop."""

    engine: Engine
    loss: Loss
    train_data: DataLoader
    batches: Prefetched
    """The micro-batches of ``train_data``."""
    eval_data: Mapping[str, DataLoader]
    """The loaders of the evaluation sets, by the prefix of their metrics."""
    lr: Callable[[int], float]
    checkpoints: CheckpointManager
    reporter: MetricsReporter
    profiler: Profiler
    state: TrainState
    run: RunConfig
    checkpoint: CheckpointConfig
    hooks: Hooks
    stop: StopPolicy
    watchdog: Watchdog


def train(t: TrainContext) -> None:
    """Train from ``t.state.step`` to the last step of the data, or to an early stop; every rank calls it.

    If ``t.stop`` has a reason, the current step is completed and saved, and training ends. With
    ``run.evaluate_only`` there is only an evaluation.
    """
    if t.run.evaluate_only:
        evaluate(t)
        return
    try:
        take_steps(t)
    finally:  # also after a failure, which the profile may explain
        t.profiler.finish(t.state.step)


def take_steps(t: TrainContext) -> None:
    """Run the steps of ``train``; evaluate and save after each step if that is due."""
    last = t.train_data.num_steps
    if t.state.owes_evaluation or ends_unevaluated(t):
        evaluate(t)
        t.checkpoints.update_state(t.state)
        if t.hooks.take("save"):
            save_checkpoint(t)
    if t.run.eval_on_start and t.state.step == 0:
        evaluate_first(t)
    while t.state.step < last and t.stop.reason is None and not t.hooks.stop:
        step = t.state.step + 1
        t.watchdog.beat(f"in step {step}")
        with t.profiler.step(step), naming_step(f"step {step}", StepOutOfMemory):
            train_step(t)
        t.checkpoints.poll(t.engine)
        t.stop.expect_save(t.checkpoints.last_write_s)
        t.stop.poll()  # sets t.stop.reason, the same on all ranks

        due = t.hooks.take("evaluate") or evaluation_due(t, step)
        t.state.owes_evaluation = bool(t.eval_data) and due
        if t.state.owes_evaluation and t.stop.reason is None:
            evaluate(t)

        ends_here = step == last or t.stop.reason is not None or t.hooks.stop
        due = is_due(t, step, t.checkpoint.save_every, t.checkpoint.save_every_epochs)
        if t.hooks.take("save") or ends_here or due:
            save_checkpoint(t)
    if t.hooks.stop:
        t.reporter.log_step()


def ends_unevaluated(t: TrainContext) -> bool:
    """Return whether a run that resumes at its last step, set lower before, lacks its final evaluation."""
    at_end = t.run.eval_at_end and 0 < t.state.step == t.train_data.num_steps
    return at_end and bool(t.eval_data) and t.state.evaluated_step != t.state.step


def wants_trial_step(t: TrainContext) -> bool:
    wanted = t.engine.device.type != "cpu" if t.run.trial_step is None else t.run.trial_step
    return wanted and not t.run.evaluate_only and t.state.step < t.train_data.num_steps


def take_trial_step(t: TrainContext, num_stages: int = 1) -> int | None:
    """Run the largest micro-batch and its neighbours forward and backward; return the ``peak_memory``.

    A run that needs too much memory fails here, in its first seconds, because the optimizer already has its
    state. The gradients are discarded; weights, optimizer and random state are unchanged afterwards. A
    neighbouring micro-batch of the same step is included, because accumulated gradients also need memory. In
    a pipeline, as many are included as a stage may hold at the same time: two for each of ``num_stages``.

    Raises:
        TrialOutOfMemory: if the step runs out of memory.
    """
    t.watchdog.beat("in the trial step")
    step, index = t.train_data.largest_microbatch()
    with (
        naming_step(f"trial step, with the batch of step {step + 1}", TrialOutOfMemory),
        t.engine.keeping_random_streams(),
        t.engine.allocated_optimizer_state(),
    ):
        batches = t.batches.microbatches(step)
        number = 2 * num_stages
        first = max(min(index, len(batches) - number), 0)
        microbatches = t.loss.prepare(batches[first : first + number], t.engine)
        t.engine.begin_train_step(microbatches, t.loss)
        t.engine.train_microbatches(microbatches, t.loss, last=True)
        t.engine.abort_train_step()
    if (peak := peak_memory(t.engine)) is not None:
        log.info("trial step: %.1f GiB at most", peak / 2**30)
    return peak


def peak_memory(engine: Engine) -> int | None:
    """Return the largest number of bytes of tensors that a rank has had on its device so far.

    None means that the device is a CPU, for which torch does not count them.
    """
    if engine.device.type == "cpu":
        return None
    return int(engine.max_over_ranks(torch.accelerator.max_memory_allocated(engine.device)))


def stop_record(t: TrainContext) -> Stopped | None:
    """Return the step and reason of a stop before the end. None means that the run is complete."""
    if t.stop.reason is None:
        return None
    return Stopped(t.state.step, t.train_data.num_steps, t.stop.reason)


def train_step(t: TrainContext) -> None:
    """Run one optimizer step on global batch ``t.state.step``."""
    began, step = time.perf_counter(), t.state.step
    microbatches = t.loss.prepare(t.batches.microbatches(step), t.engine)
    t.engine.begin_train_step(microbatches, t.loss)
    t.engine.train_microbatches(microbatches, t.loss, last=True)
    max_loss = t.state.max_loss(t.run.loss_spike_factor)
    observe = partial(t.hooks.call, "before_update")
    result = t.engine.finish_train_step(t.lr(step), max_loss=max_loss, before_update=observe)
    stats = t.train_data.stats(step)
    t.state.advance(
        num_samples=stats.num_samples,
        num_tokens=stats.num_tokens,
        skipped=result.skipped,
        loss=result.loss,
        overflow=result.overflow,
    )
    t.state.stream_position = t.train_data.advance(t.state.step)
    seconds, epoch = time.perf_counter() - began, t.train_data.epoch(t.state.step)
    t.reporter.step(t.state, stats, result, lr=t.lr(step), epoch=epoch, seconds=seconds)
    if every(t.run.log_every, t.state.step, t.train_data.num_steps):
        t.state.begin_interval()
    if result.skipped:
        t.reporter.skipped(t.state.step, result, max_loss, t.train_data.sample_ids(step))
    t.hooks.call("after_step", result, stats)


def evaluate(t: TrainContext) -> None:
    """Evaluate on all evaluation sets, if there are any, and record the metrics.

    If a stop interrupts the evaluation, nothing is recorded.
    """
    if not t.eval_data:
        return
    with naming_step(f"evaluation at step {t.state.step}"):
        means = eval_means(t)
    if t.stop.reason is not None:
        return
    t.state.owes_evaluation, t.state.evaluated_step = False, t.state.step
    t.reporter.evaluation(t.state, means)
    if t.state.step < t.train_data.num_steps:
        t.stop.check_prune(t.state.step, means["eval/loss"])
    # Data-parallel groups sum separately: a difference in the last bit must not change a decision.
    agreed = {name: t.engine.max_over_ranks(value) for name, value in means.items()}
    t.hooks.call("after_evaluation", agreed)


def evaluate_first(t: TrainContext) -> None:
    """Log the evaluation metrics of the initial weights.

    They do not affect early stopping, pruning, the best checkpoint or hooks.
    """
    if t.eval_data:
        with naming_step("evaluation before the first step"):
            means = eval_means(t)
        if t.stop.reason is None:
            t.reporter.evaluation(t.state, means)


def eval_means(t: TrainContext) -> dict[str, float]:
    """Return the metrics of each evaluation set and, as ``eval/METRIC``, their unweighted mean over the sets.

    If a stop interrupts the evaluation, the result is incomplete.
    """
    found: dict[str, float] = {}
    means: Mapping[str, float] = {}
    for name, data in t.eval_data.items():
        means = t.engine.evaluate(eval_batches(t, data), t.loss)
        found |= {f"{name}/{metric}": value for metric, value in means.items()}
        if t.stop.reason is not None:
            return found
    each = {metric: [found[f"{name}/{metric}"] for name in t.eval_data] for metric in means}
    return {f"eval/{metric}": sum(values) / len(values) for metric, values in each.items()} | found


def eval_batches(t: TrainContext, data: DataLoader) -> Iterator[Sequence[Batch]]:
    for number in range(data.num_steps):
        t.watchdog.beat(f"in batch {number + 1} of the evaluation at step {t.state.step}")
        yield data.microbatches(number)
        t.reporter.evaluated_batch()
        if t.stop.poll(evaluates=True) is not None:
            return


def save_checkpoint(t: TrainContext) -> None:
    t.watchdog.beat(f"saving step {t.state.step}")
    began = t.stop.clock()
    is_whole = t.checkpoints.save(t.engine, t.state, t.hooks.tensors())
    t.stop.record_save(t.stop.clock() - began, is_whole=is_whole)
    t.stop.poll()  # a stop requested during the save: no further step begins


def evaluation_due(t: TrainContext, step: int) -> bool:
    """Return whether an evaluation is due after ``step``."""
    at_end = t.run.eval_at_end and step == t.train_data.num_steps
    return at_end or is_due(t, step, t.run.eval_every, t.run.eval_every_epochs)


def is_due(t: TrainContext, step: int, steps: float, epochs: int) -> bool:
    """Return whether ``step`` is a multiple of ``steps`` or completes a multiple of ``epochs`` epochs.

    As in ``every``, ``steps`` below 1 is a share of the run; 0 means never.
    """
    last = t.train_data.num_steps
    if every(steps, step, last):
        return True
    before, epoch = t.train_data.epoch(step - 1), t.train_data.epoch(step)
    if before is None or epoch is None:
        return False
    return epochs > 0 and int(epoch) // epochs > int(before) // epochs
