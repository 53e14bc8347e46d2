"""Where a run stands."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from components.contracts.errors import NonRetryableError


@dataclass
class TrainState:
    """Counters of a run since its very first step; a checkpoint holds them."""

    step: int = 0
    """Optimizer steps completed, skipped ones included: it is also the position in the data."""
    num_samples: int = 0
    num_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    owes_evaluation: bool = False
    """One was due at ``step``, and a stop has cut it short: the run that goes on begins with it."""
    best: float | None = None
    """The best value of the watched metric so far, None where there is none, and ..."""
    best_of: str | None = None
    """... of what it is the best, such as ``min eval/loss``: watching something else begins anew."""
    best_step: int | None = None
    evals_since_best: int = 0
    loss_mean: float | None = None
    """Running mean of the losses of steps that were taken: the newest weighs a tenth."""

    def advance(self, *, num_samples: int, num_tokens: int, skipped: bool, loss: float) -> None:
        self.step += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            before = loss if self.loss_mean is None else self.loss_mean
            self.loss_mean = before + (loss - before) / 10

    def max_loss(self, spike_factor: float | None) -> float:
        """Over which the loss of the next step is a spike; infinite before ten steps were taken.

        Of a mean that is not above 0 there is no multiple that tells.
        """
        if spike_factor is None or self.step - self.skipped < 10 or not self.loss_mean or self.loss_mean < 0:
            return math.inf
        return spike_factor * self.loss_mean

    def evaluated(self, means: Mapping[str, float], metric: str, mode: str) -> bool:
        """Takes note of an evaluation; whether its ``metric`` (with ``eval/``) is better than ever before.

        Raises:
            FinalError: there is no such metric.
        """
        named = {f"eval/{name}": value for name, value in means.items()}
        if metric not in named:
            raise NonRetryableError(
                f"{metric} (checkpoint.keep_best, early_stopping.metric): the evaluation has no such metric; "
                f"use one of {', '.join(sorted(named))}."
            )
        if self.best_of != (watched := f"{mode} {metric}"):
            self.best, self.best_of, self.best_step, self.evals_since_best = None, watched, None, 0
        value, sign = named[metric], -1 if mode == "max" else 1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.evals_since_best = value, self.step, 0
            return True
        self.evals_since_best += 1
        return False
