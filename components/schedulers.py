"""Learning-rate schedules: pure functions of the step, so there is nothing to checkpoint.

``lr(step, peak=, total_steps=)`` is the learning rate of the update after ``step`` completed ones; ``step``
is 0 for the first update. All schedules begin with a linear warmup from 0, as in transformers and Megatron.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from components.contracts.errors import ConfigError

DecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]

DECAYS: dict[DecayStyle, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2 * 0.5**progress - 1,
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Functions from the progress in [0, 1] to the remaining share of ``peak - min_lr``, which falls from 1 to 0,
as in Megatron."""


@dataclass(frozen=True)
class Scheduler(ABC):
    warmup_steps: int = 0
    warmup_ratio: float = field(default=0.0, kw_only=True)
    """Length of the warmup as a share of the run, rounded up to whole steps, in place of ``warmup_steps``."""

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                "scheduler.warmup_steps, scheduler.warmup_ratio: both are given; set one of them to 0."
            )
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(
                f"scheduler.warmup_ratio: must be a share of the run from 0 to 1, got {self.warmup_ratio}."
            )
        for name in ("warmup_steps", "decay_steps", "min_lr"):
            value = getattr(self, name, None)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"scheduler.{name}: must be at least 0, got {value}.")

    def check(self, *, peak: float, total_steps: int) -> None:
        """Raise ConfigError if the schedule does not fit a run of ``total_steps`` with the rate ``peak``."""
        if self.warmup_steps > total_steps:
            raise ConfigError(
                f"scheduler.warmup_steps: is {self.warmup_steps}, but the run has {total_steps} steps; "
                "lower it or raise run.max_steps."
            )
        min_lr = getattr(self, "min_lr", None)
        if min_lr is not None and min_lr > peak:
            raise ConfigError(f"scheduler.min_lr: is {min_lr}, above optimizer.lr={peak}; lower it.")

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        """Return the learning rate of the update that follows ``step`` completed ones."""
        warmup = self.warmup(total_steps)
        if step < warmup:
            return peak * step / warmup
        return self.after_warmup(step, peak, total_steps)

    def warmup(self, total_steps: int) -> int:
        """Return the number of steps of the warmup."""
        return math.ceil(self.warmup_ratio * total_steps) if self.warmup_ratio else self.warmup_steps

    @abstractmethod
    def after_warmup(self, step: int, peak: float, total_steps: int) -> float: ...


@dataclass(frozen=True)
class Constant(Scheduler):
    """A constant rate of ``peak``."""

    def after_warmup(self, step: int, peak: float, total_steps: int) -> float:  # noqa: ARG002
        return peak


@dataclass(frozen=True)
class Decay(Scheduler):
    """A decay from ``peak`` to a floor in ``decay_steps``, then the floor."""

    decay_steps: int | None = None
    """Length of the decay after the warmup. None means the rest of the run."""

    style: ClassVar[DecayStyle]

    @abstractmethod
    def floor(self, peak: float) -> float: ...

    def after_warmup(self, step: int, peak: float, total_steps: int) -> float:
        warmup = self.warmup(total_steps)
        length = total_steps - warmup if self.decay_steps is None else self.decay_steps
        return decayed(self.style, step - warmup, length, peak, self.floor(peak))


@dataclass(frozen=True)
class Linear(Decay):
    """A straight line from ``peak`` to ``min_lr``."""

    min_lr: float = 0.0
    style: ClassVar[DecayStyle] = "linear"

    def floor(self, peak: float) -> float:  # noqa: ARG002
        return self.min_lr


@dataclass(frozen=True)
class Cosine(Linear):
    """Half a cosine from ``peak`` to ``min_lr`` (Loshchilov and Hutter, 2017)."""

    style: ClassVar[DecayStyle] = "cosine"


@dataclass(frozen=True)
class CosineMinLR(Decay):
    """Half a cosine from ``peak`` to ``min_lr``, by default a tenth of ``peak``."""

    min_lr: float | None = None
    """Rate at the end of the decay. None means a tenth of ``peak``."""
    style: ClassVar[DecayStyle] = "cosine"

    def floor(self, peak: float) -> float:
        return peak / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True)
class InverseSqrt(Scheduler):
    """``peak * sqrt(warmup_steps / step)``, at least ``min_lr`` (Vaswani et al., 2017).

    Without a warmup the rate is ``peak / sqrt(step)``, as in Megatron; transformers would then use its own
    default, ``timescale=10000``.
    """

    decay_steps: int | None = None
    """Number of steps after the warmup until the rate drops to ``min_lr`` at once. None means that it does
    not."""
    min_lr: float = 0.0

    def after_warmup(self, step: int, peak: float, total_steps: int) -> float:
        warmup = self.warmup(total_steps)
        if self.decay_steps is not None and step - warmup > self.decay_steps:
            return self.min_lr
        return max(self.min_lr, peak * math.sqrt(max(warmup, 1) / max(step, 1)))


@dataclass(frozen=True)
class WSD(Scheduler):
    """Warmup, stable, decay: ``peak`` until the last ``decay_steps`` of the run (Hu et al., 2024)."""

    decay_steps: int | None = None
    """Length of the decay at the end of the run, 0 for none. None means a tenth of the run, rounded up."""
    min_lr: float = 0.0
    decay_style: DecayStyle = "minus_sqrt"

    def check(self, *, peak: float, total_steps: int) -> None:
        super().check(peak=peak, total_steps=total_steps)
        length = self._length(total_steps)
        warmup = self.warmup(total_steps)
        if warmup + length > total_steps:
            raise ConfigError(
                f"scheduler.decay_steps: {length} after {warmup} of warmup do not fit "
                f"into a run of {total_steps} steps; lower one of them."
            )

    def after_warmup(self, step: int, peak: float, total_steps: int) -> float:
        length = self._length(total_steps)
        began = total_steps - length
        return peak if step < began else decayed(self.decay_style, step - began, length, peak, self.min_lr)

    def _length(self, total_steps: int) -> int:
        return math.ceil(total_steps / 10) if self.decay_steps is None else self.decay_steps


def decayed(style: DecayStyle, steps: int, length: int, peak: float, min_lr: float) -> float:
    """Return the rate after ``steps`` of a decay of ``length`` steps that ends at ``min_lr``."""
    if steps >= length:
        return min_lr
    return min_lr + (peak - min_lr) * DECAYS[style](steps / length)
