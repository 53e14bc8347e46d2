"""Options of all compared programs.

The Python of each peer imports this file, so it uses only the standard library.
"""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

LEARNING_RATES = {"pt": 1e-3, "sft": 1e-3, "dpo": 1e-5}
MAX_LENGTH = 1024
ROWS = 4
"""Number of rows of ``MAX_LENGTH`` tokens, or of pairs, in one step."""


@dataclass(frozen=True)
class Asked:
    data: Path
    """Folder made by ``benchmarks.baselines.samples``."""
    stage: str
    dtype: str
    steps: int
    output: Path
    """Empty folder for the files of the program."""
    order: Path | None
    """JSON file with the samples of each step, for programs that can use it."""
    share_prompt: bool
    compile: bool

    @property
    def model(self) -> Path:
        return self.data / "model_small"

    @property
    def lr(self) -> float:
        return LEARNING_RATES[self.stage]


def parse(arguments: list[str] | None = None) -> Asked:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--stage", choices=LEARNING_RATES, required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--order", type=Path)
    parser.add_argument("--share-prompt", action="store_true")
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args(arguments)
    return Asked(**{field.name: getattr(asked, field.name) for field in fields(Asked)})
