"""The progress of a run, as its checkpoints save it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from components.checkpoint import read_meta
from components.contracts.errors import ConfigError
from components.json_text import as_type


@dataclass
class TrainState:
    """Counters of a run since its first step; a checkpoint holds them."""

    step: int = 0
    """Completed optimizer steps, including skipped ones. It is also the position in the data."""
    num_samples: int = 0
    num_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    owes_evaluation: bool = False
    """Whether a stop interrupted the evaluation due at ``step``, with which a resumed run begins."""
    evaluated_step: int | None = None
    """Step of the last evaluation. None means that there is none yet."""
    best: float | None = None
    """The best value of the watched metric so far. None means that there is none yet."""
    best_of: str | None = None
    """Mode and name of the watched metric, such as ``min eval/loss``. A change of it resets ``best``."""
    best_step: int | None = None
    evals_since_best: int = 0
    loss_mean: float | None = None
    """Running mean of the losses of steps that were not skipped; the newest loss has weight 0.1."""
    interval_loss: float = 0.0
    """Sum of the finite losses since the last row of metrics."""
    interval_steps: int = 0
    """Number of the losses in ``interval_loss``."""
    stream_position: list[int] = field(default_factory=list)
    """Position of the next step in streamed data, see ``DataLoader.advance``. It is empty for other data."""

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Return the state in ``checkpoint``; raise ConfigError if a field is unknown or of another type."""
        found = read_meta(checkpoint).state
        try:
            if unknown := found.keys() - {known.name for known in fields(cls)}:
                raise ValueError(f"{min(unknown)} is unknown")
            return as_type(cls, found)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint.resume: the state in {checkpoint / 'meta.json'} is of another version "
                f"({error}); take another checkpoint."
            ) from error

    def advance(
        self, *, num_samples: int, num_tokens: int, skipped: bool, loss: float, overflow: bool = False
    ) -> None:
        """Count one step.

        A step with an ``overflow`` (see ``StepResult``) counts as skipped, but not towards
        ``skipped_in_a_row``.
        """
        self.step += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.skipped += skipped
        if not overflow:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if math.isfinite(loss):
            self.interval_loss += loss
            self.interval_steps += 1
        if not skipped:
            before = loss if self.loss_mean is None else self.loss_mean
            self.loss_mean = before + (loss - before) / 10

    def interval_mean(self) -> float:
        """Return the mean of the finite losses since the last logged interval ended, or NaN."""
        return self.interval_loss / self.interval_steps if self.interval_steps else math.nan

    def begin_interval(self) -> None:
        self.interval_loss, self.interval_steps = 0.0, 0

    def max_loss(self, spike_factor: float | None) -> float:
        """Return the loss above which the next step is a spike, or infinity if there is no threshold.

        There is no threshold if ``spike_factor`` is None, if fewer than ten steps were not skipped, or if the
        running mean of the loss is not positive.
        """
        if spike_factor is None or self.step - self.skipped < 10 or not self.loss_mean or self.loss_mean < 0:
            return math.inf
        return spike_factor * self.loss_mean

    def evaluated(self, means: Mapping[str, float], metric: str, mode: str) -> bool:
        """Record the metrics ``means`` of an evaluation; return whether ``metric`` is the best so far."""
        if self.best_of != (watched := f"{mode} {metric}"):
            self.best, self.best_of, self.best_step, self.evals_since_best = None, watched, None, 0
        value, sign = means[metric], -1 if mode == "max" else 1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.evals_since_best = value, self.step, 0
            return True
        self.evals_since_best += 1
        return False
