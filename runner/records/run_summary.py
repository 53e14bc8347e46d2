"""Summary of the results of a run, which is in run.json whatever loggers are chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Results:
    """First and last finite values of the metrics. A run that resumes in its folder adds to them."""

    first: dict[str, float] = field(default_factory=dict)
    """The first training row that has a loss."""
    last: dict[str, float] = field(default_factory=dict)
    """The last value under every key; ``step`` is that of the last training row that has a loss."""
    diverged: bool = False
    """Whether the loss of the last evaluation is not finite.

    If so, ``last`` has only the finite metrics of this evaluation.
    """

    def add(self, row: Mapping[str, float | int | None]) -> None:
        known = {key: value for key, value in row.items() if value is not None and math.isfinite(value)}
        if "train/loss" not in known:
            known.pop("step")
        elif not self.first:
            self.first = known
        if "eval/loss" in row:
            self.diverged = "eval/loss" not in known
            if self.diverged:  # an older evaluation is not the result of this model
                self.last = {key: value for key, value in self.last.items() if not key.startswith("eval/")}
        self.last |= known

    def up_to(self, step: int) -> "Results":
        """Return the results as of ``step``, without what later steps have replaced."""
        if self.last.get("step", 0) <= step:
            return self
        return Results(first=self.first if self.first.get("step", math.inf) <= step else {})

    def final_loss(self) -> float:
        """Return the last eval loss, else the last train loss; NaN if it is not finite or was not logged."""
        if self.diverged:
            return math.nan
        return self.last.get("eval/loss", self.last.get("train/loss", math.nan))
