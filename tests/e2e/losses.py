"""Losses from outside the package that go wrong in the ways ranks go wrong: ``stage._target_=tests...``."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from components.losses import NextToken
from runner.protocols import Batch, LossOutput, TokenStats


@dataclass(frozen=True)
class Fails(NextToken):
    """On rank ``rank``, in the third call: raises, exits, is killed, or hangs (and says so in a file)."""

    how: str = "raise"
    rank: int = 1
    ready: str | None = None
    calls: int = 0

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        object.__setattr__(self, "calls", self.calls + 1)
        if self.calls == 3 and int(os.environ.get("RANK", "0")) == self.rank:
            self._fail()
        return super().__call__(stats, batch)

    def _fail(self) -> None:
        if self.ready is not None:
            Path(self.ready).write_text(str(os.getpid()))
        if self.how == "raise":
            raise RuntimeError("the third call is a bad one")
        if self.how == "exit":
            sys.exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
