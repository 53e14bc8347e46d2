"""The ``scheduler`` group."""

from typing import Protocol


class SchedulerSpec(Protocol):
    """A pure function of the step: nothing to checkpoint, the same on every engine."""

    def lr(self, step: int, *, peak: float, total_steps: int) -> float:
        """The learning rate of the update after ``step`` completed ones."""

    def check(self, *, peak: float, total_steps: int) -> None:
        """Raises ConfigError where the schedule does not fit the run."""
