"""A layout from outside the package that goes wrong: ``parallelism._target_=tests.slurm.faulty.Faulty``."""

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from components.engines.fsdp2 import FSDP2


@dataclass(frozen=True)
class Faulty(FSDP2):
    """Rank 1 fails in the third step or after the last collective, or every rank hangs, or is slow."""

    fault: Literal["none", "middle", "late", "hang", "slow"] = "none"
    step_s: float = 0.5
    """Of the slow one."""

    def build(self, *args: Any, **options: Any) -> Any:
        engine = super().build(*args, **options)
        train, close, steps = engine.begin_train_step, engine.close, iter(range(1, 10**6))
        mine = os.environ.get("RANK", "0") == "1"

        def begin(*args: Any, **options: Any) -> None:
            step = next(steps)
            if mine and self.fault == "middle" and step == 3:
                raise RuntimeError("the third step is a bad one")
            if self.fault == "hang" and step == 3:
                time.sleep(600)
            if self.fault == "slow":
                time.sleep(self.step_s)
            train(*args, **options)

        def close_late() -> None:
            close()
            if mine and self.fault == "late":
                raise RuntimeError("after the last collective")

        engine.begin_train_step, engine.close = begin, close_late
        return engine
