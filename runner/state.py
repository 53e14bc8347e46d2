"""Where a run stands."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Counters of a run since its very first step; a checkpoint holds them."""

    step: int = 0
    """Optimizer steps completed, skipped ones included: it is also the position in the data."""
    num_samples: int = 0
    num_tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    def advance(self, *, num_samples: int, num_tokens: int, skipped: bool) -> None:
        self.step += 1
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
