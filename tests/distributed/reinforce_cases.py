"""The example of an engine that is driven by hand, on the ranks of a layout."""

import runpy
from pathlib import Path

import torch

from components.contracts.engine import EngineOptions
from components.engines.fsdp2 import FSDP2
from components.optimizers import AdamW

EXAMPLE = Path(__file__).parents[2] / "examples" / "reinforce.py"


def reinforced(on: FSDP2) -> list[float]:
    """Return the probability of a rewarded answer before each of ten steps."""
    example = runpy.run_path(str(EXAMPLE))
    engine = on.build(example["MODEL"], AdamW(weight_decay=0.0), EngineOptions(torch.float32, "cpu"))
    rates: list[float] = example["train"](engine, 10)
    engine.close()
    return rates
