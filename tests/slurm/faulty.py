"""A layout from outside the package that fails: ``parallelism._target_=tests.slurm.faulty.Faulty``."""

import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from components.engines.fsdp2 import FSDP2


@dataclass(frozen=True)
class Faulty(FSDP2):
    """A layout whose rank 1 fails in step 3 or after the last collective, or whose ranks hang or are slow."""

    fault: Literal["none", "middle", "late", "hang", "slow"] = "none"
    step_s: float = 0.5
    """Extra duration of each step in seconds with the fault ``slow``."""

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
