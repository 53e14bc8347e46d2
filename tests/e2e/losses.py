"""Losses from outside the package that make ranks fail: ``stage._target_=tests...``."""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.loss import LossOutput, TokenStats
from components.losses import NextToken


@dataclass(frozen=True)
class Fails(NextToken):
    """In call ``at`` on rank ``rank``, raises, has no memory, exits, kills the process, hangs, or continues.

    It then writes the file ``ready``. With ``once``, nothing happens if the file already exists.
    """

    how: str = "raise"
    rank: int = 1
    ready: str | None = None
    once: bool = False
    at: int = 3
    calls: int = 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        object.__setattr__(self, "calls", self.calls + 1)
        if self.calls == self.at and int(os.environ.get("RANK", "0")) == self.rank:
            self._fail()
        return super().__call__(stats, batch)

    def _fail(self) -> None:
        if self.ready is not None:
            if self.once and Path(self.ready).exists():
                return
            Path(self.ready).write_text(str(os.getpid()))
        if self.how == "raise":
            raise RuntimeError("the third call is a bad one")
        if self.how == "memory":
            raise MemoryError
        if self.how == "exit":
            sys.exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hang":
            time.sleep(600)


@dataclass(frozen=True)
class Signalled(NextToken):
    """Sends the signals ``numbers`` to this process in call ``at`` of the training or of the evaluation."""

    numbers: tuple[int, ...] = (signal.SIGTERM,)
    at: int = 3
    training: bool = True
    calls: int = 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        if stats.logps.requires_grad == self.training:
            object.__setattr__(self, "calls", self.calls + 1)
            if self.calls == self.at:
                for number in self.numbers:
                    os.kill(os.getpid(), number)
        return super().__call__(stats, batch)


@dataclass(frozen=True)
class Undetermined(NextToken):
    """A loss with an operation in its backward pass that has no deterministic implementation in torch."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output = super().__call__(stats, batch)
        return LossOutput({"loss": output.terms["loss"] + 0 * undetermined(stats.logps)})


def undetermined(values: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.max_unpool1d(*F.max_pool1d(values[None, :1, :4], 2, return_indices=True), 2).sum()


@dataclass(frozen=True)
class Marked(NextToken):
    """A loss that is multiplied by ``factor`` in micro-batches with a sample of 32 or more labels."""

    factor: float = math.nan

    def weights(self, batch: Batch) -> None:
        """Return None, because the loss is not a weighted sum of log-probabilities."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        output = super().__call__(stats, batch)
        marked = bool(((batch.labels != IGNORE).sum(-1) >= 32).any())
        return LossOutput({"loss": output.terms["loss"] * self.factor}) if marked else output


@dataclass(frozen=True)
class Scaled(NextToken):
    """A loss that is multiplied by ``factor``."""

    factor: float = math.nan

    def weights(self, batch: Batch) -> None:
        """Return None, because the loss is not a weighted sum of log-probabilities."""

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        return LossOutput({"loss": super().__call__(stats, batch).terms["loss"] * self.factor})


@dataclass(frozen=True)
class Demanding(NextToken):
    """A loss with two keys that have no default."""

    strength: float
    floor: float
