"""The ``scheduler`` group."""

from typing import Protocol


class SchedulerSpec(Protocol):
    """A pure function of the step, without state to checkpoint, the same for every engine."""

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        """Return the learning rate of the update after ``step`` completed updates."""

    def check(self, *, peak: float, total_steps: int) -> None:
        """Raise ConfigError if the schedule does not fit the run."""
