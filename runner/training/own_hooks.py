"""Built-in hooks: best metric, limit of skipped steps, updates of the reference model."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.checkpoint.folder import step_folder
from components.contracts.data import BatchStats
from components.contracts.engine import StepResult
from components.contracts.errors import NonRetryableError
from components.contracts.hook import Hook, HookRun
from components.reference.source import ReferenceSource
from runner.config.run_config import WatchedMetric
from runner.training.state import TrainState

log = logging.getLogger("runner")


@dataclass(kw_only=True)
class BestMetric(Hook):
    """A hook that records the best value of a metric, requests checkpoints of it, and ends a run early."""

    state: TrainState
    watched: WatchedMetric
    saves: bool
    """Whether a checkpoint is saved whenever the value is the best so far."""
    patience: int | None
    """Number of evaluations since the best one after which the run ends. None means no early stopping."""

    def begin(self, run: HookRun) -> None:
        old = run.resumed_from
        if self.saves and old is not None and old.parent != run.folder / "checkpoints":
            self._say_where_the_best_is(old.parent)
        self._stop_if_exhausted(run)

    def after_evaluation(self, run: HookRun, metrics: Mapping[str, float]) -> None:
        improved = self.state.evaluated(metrics, self.watched.name, self.watched.mode)
        if improved and self.saves:
            run.ask("save")
        self._stop_if_exhausted(run)

    def _watches_as_before(self) -> bool:
        return self.state.best_of == f"{self.watched.mode} {self.watched.name}"

    def _say_where_the_best_is(self, checkpoints: Path) -> None:
        step = self.state.best_step
        if self._watches_as_before() and step is not None and step_folder(checkpoints, step).is_dir():
            log.info("the best %s so far is that of step %d in %s", self.watched.name, step, checkpoints)

    def _stop_if_exhausted(self, run: HookRun) -> None:
        state = self.state
        if self.patience is None or not self._watches_as_before() or state.evals_since_best < self.patience:
            return
        since = "the start" if state.best_step is None else f"step {state.best_step}"
        log.info(
            "stopped early at step %d: %s has not improved since %s", state.step, self.watched.name, since
        )
        run.ask("stop")


@dataclass(kw_only=True)
class SkipLimit(Hook):
    """A hook that ends a run after ``limit`` consecutive skipped steps."""

    state: TrainState
    limit: int

    def after_step(self, run: HookRun, result: StepResult, stats: BatchStats) -> None:  # noqa: ARG002
        """Raise NonRetryableError if ``limit`` consecutive steps were skipped."""
        if self.state.skipped_in_a_row >= self.limit:
            raise NonRetryableError(
                f"step {self.state.step}: the update was skipped {self.state.skipped_in_a_row} steps in a "
                "row (run.max_consecutive_skips), as the log says; lower optimizer.lr, or look at the "
                "samples that it names."
            )


@dataclass(kw_only=True)
class SyncReference(Hook):
    """A hook that mixes the trained weights into the reference model every ``sync_every`` steps."""

    source: ReferenceSource

    def after_step(self, run: HookRun, result: StepResult, stats: BatchStats) -> None:  # noqa: ARG002
        if self.source.sync_every and run.state.step % self.source.sync_every == 0:
            run.engine.mix_reference(self.source.sync_mixup)
