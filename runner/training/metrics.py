"""The output of a run: the console line, the progress bar, and a row for every logger."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import psutil
from rich.progress import Progress, TaskID

from components.contracts.data import BatchStats
from components.contracts.engine import StepResult
from components.loggers import CompositeLogger, RunResult
from runner.config.run_config import every
from runner.records.run_record import Stopped
from runner.records.run_summary import Results
from runner.training.state import TrainState
from runner.training.stop import PRUNED

log = logging.getLogger("runner")

Row = dict[str, float | int | None]

NAMED_SAMPLES = 16
"""Maximum number of samples that the log names for a skipped update."""


@dataclass
class Window:
    """Totals over the steps since the last logged step, from which the mean throughput is computed."""

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class MetricsReporter:
    """The reporter of a run's metrics, which has loggers and a progress bar only on the main rank."""

    log_every: float
    flops: Callable[[BatchStats], float]
    """Floating point operations of one step on a global batch."""
    peak_flops: float | None
    """FLOP/s of all ranks together. None means that it is unknown."""
    peak_memory: Callable[[], int | None]
    """A function that every rank calls, and that returns the largest peak of device memory of all ranks in
    bytes. None means that the device is a CPU."""
    loggers: CompositeLogger | None = None
    progress: Progress | None = None
    results: Results = field(default_factory=Results)
    stopped: Stopped | None = None
    failure: str | None = None
    """Why the run has failed although no rank has. None means that it has not."""
    window: Window = field(default_factory=Window)
    pending_row: Callable[[], Row] | None = None
    """A function that makes the row of the last step. None means that its row was written."""
    task: TaskID | None = None
    total_steps: int = 0
    evaluates_only: bool = False
    """Whether the run takes no steps; the progress bar then counts the batches of the evaluation."""

    def __enter__(self) -> Self:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.loggers is not None:
            self.loggers.finish(self._ending(error))

    def start(self, state: TrainState, total_steps: int) -> None:
        self.total_steps = total_steps
        if self.progress is not None:
            self.task = self.progress.add_task("step", total=total_steps, completed=state.step)

    def start_evaluation(self, num_batches: int) -> None:
        """Begin a run that only evaluates ``num_batches`` batches."""
        self.evaluates_only = True
        if self.progress is not None:
            self.task = self.progress.add_task("batch", total=num_batches)

    def evaluated_batch(self) -> None:
        """Count one batch of an evaluation, which the progress bar shows if the run takes no steps."""
        if self.evaluates_only and self.progress is not None and self.task is not None:
            self.progress.advance(self.task)

    def step(
        self,
        state: TrainState,
        stats: BatchStats,
        result: StepResult,
        *,
        lr: float,
        epoch: float | None,
        seconds: float,
    ) -> None:
        """Count one step; write a row every ``log_every`` steps and for the last step.

        Every rank calls this method. If ``log_every`` is 0, no row is written.
        """
        window = self.window
        window.steps += 1
        window.tokens += stats.num_tokens
        window.flops += self.flops(stats)
        window.seconds += seconds
        if self.progress is not None and self.task is not None:
            description = "step" if epoch is None else f"epoch {epoch:.2f}  step"
            self.progress.update(self.task, completed=state.step, description=description)
        self.pending_row = partial(train_row, state, stats, result, lr, epoch)
        if state.step == self.total_steps or every(self.log_every, state.step, self.total_steps):
            self.log_step()

    def log_step(self) -> None:
        """Write the row of the last step if it has not been written; every rank calls this method."""
        if self.pending_row is None or not self.log_every:
            return
        row = self.pending_row() | performance(self.window, self.peak_flops) | self._memory()
        self.window, self.pending_row = Window(), None
        self._write(row, train_line(row))

    def skipped(self, step: int, result: StepResult, max_loss: float, samples: Sequence[str]) -> None:
        """Log why the update of ``step`` was skipped and, unless gradients overflowed, the step's samples."""
        if self.loggers is None:
            return
        if result.overflow:
            scale = result.metrics["loss_scale"]
            log.info(f"step {step}: gradients overflow; the update is skipped and the scale {scale:g} halved")
            return
        if not math.isfinite(result.loss):
            why = f"loss is {result.loss}"
        elif not math.isfinite(result.grad_norm):
            why = f"gradient norm is {result.grad_norm}"
        else:
            why = f"loss is {result.loss:.4f}, over {max_loss:.4f} (run.loss_spike_factor)"
        named = ", ".join(samples[:NAMED_SAMPLES])
        more = len(samples) - NAMED_SAMPLES
        rest = f" and {more} more" if more > 0 else ""
        log.warning(f"step {step}: {why}; the update is skipped; samples {named}{rest}")

    def evaluation(self, state: TrainState, means: Mapping[str, float]) -> None:
        row: Row = {"step": state.step, **means}
        numbers = "  ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in means.items())
        at = "" if self.evaluates_only else f"step {state.step}  "
        self._write(row, f"{at}eval: {numbers}")

    def of_hook(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Write metrics of a hook, numbers or tensors of one element, without a line on the terminal."""
        found = {name: None if value is None else float(value) for name, value in metrics.items()}
        self._write({"step": state.step, **found})

    def table_of_hook(self, state: TrainState, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table of a hook to the loggers."""
        if self.loggers is not None:
            self.loggers.log_table(name, rows, state.step)

    def _write(self, row: Row, line: str | None = None) -> None:
        if self.loggers is not None:
            if line is not None:
                log.info(line)
            self.results.add(row)
            self.loggers.log(row)

    def _memory(self) -> Row:
        """Return the memory in GiB: the largest GPU peak of all ranks or, on CPUs, this process's RSS."""
        if (peak := self.peak_memory()) is not None:
            return {"perf/peak_memory_gib": peak / 2**30}
        return {"perf/rss_gib": psutil.Process().memory_info().rss / 2**30}

    def _ending(self, error: BaseException | None) -> RunResult:
        last = self.results.last
        if isinstance(error, KeyboardInterrupt):
            return RunResult("interrupted", last, "interrupted")
        if error is not None:
            return RunResult("failed", last, f"{type(error).__name__}: {error}")
        if self.failure is not None:
            return RunResult("failed", last, self.failure)
        if self.stopped is not None:
            pruned = self.stopped.reason == PRUNED  # it will not be resumed
            return RunResult("completed" if pruned else "interrupted", last, self.stopped.reason)
        return RunResult("completed", last)


def train_row(
    state: TrainState, stats: BatchStats, result: StepResult, lr: float, epoch: float | None
) -> Row:
    """Return the metrics of one step.

    ``train/loss`` is the mean since the last logged step. ``total_*`` and ``epoch`` count from the first step
    of the run.
    """
    row: Row = {
        "step": state.step,
        # If no loss of the interval is finite, this is the loss of its last step.
        "train/loss": state.interval_mean() if state.interval_steps else result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": lr,
        "train/num_tokens": stats.num_tokens,
        "train/num_labels": stats.num_labels,
        "train/total_tokens": state.num_tokens,
        "train/total_samples": state.num_samples,
        "train/total_skipped": state.skipped,
        "train/seqlen_mean": stats.seqlen_mean,
        "train/seqlen_max": stats.seqlen_max,
    }
    if epoch is not None:
        row["train/epoch"] = epoch
    if result.num_zeros is not None:
        row["train/num_zeros_in_grad"] = result.num_zeros
    return row | {f"train/{name}": value for name, value in result.metrics.items()}


def performance(window: Window, peak_flops: float | None) -> Row:
    flops_per_s = window.flops / window.seconds
    return {
        "perf/tokens_per_s": window.tokens / window.seconds,
        "perf/step_ms": 1000 * window.seconds / window.steps,
        "perf/mfu": flops_per_s / peak_flops if peak_flops else None,
    }


def train_line(row: Row) -> str:
    """Format the main metrics as one line of about 80 columns; metrics.jsonl has all metrics."""
    memory_gib = row["perf/peak_memory_gib"] if "perf/peak_memory_gib" in row else row["perf/rss_gib"]
    skipped = f"  skipped {row['train/total_skipped']}" if row["train/total_skipped"] else ""
    return (
        f"step {row['step']}  loss {row['train/loss']:.4f}  lr {row['train/lr']:.2e}  "
        f"grad_norm {row['train/grad_norm']:.3f}  {row['perf/tokens_per_s']:,.0f} tok/s  "
        f"{memory_gib:.2f} GiB{skipped}"
    )
