"""Every metric that runs log is explained in docs/metrics.md."""

import re
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from components.contracts.data import BatchStats
from components.contracts.engine import StepResult
from components.models.moe_loss_config import AUX, Z
from components.preflight.eval_metrics import metric_names
from runner.training.metrics import Window, performance, train_row
from runner.training.state import TrainState

ROOT = Path(__file__).parents[2]
EXPLAINED = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
FURTHER = {"pt": {"token_accuracy": True, "label_smoothing": 0.1, "z_loss": 1e-4}, "dpo": {"rpo_alpha": 1.0}}
"""Options with which a loss reports more."""


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "stage").glob("*.yaml")), ids=lambda path: path.stem)
def test_metrics_of_losses(path: Path) -> None:
    loss = instantiate(OmegaConf.load(path), **FURTHER.get(path.stem, {}))
    assert {f"train/{name}" if name == "loss" else name for name in metric_names(loss)} <= EXPLAINED


def test_metrics_of_steps() -> None:
    result = StepResult(1.0, 1.0, False, dict.fromkeys(("loss_scale", "lm_loss", AUX, Z), 1.0), num_zeros=1)
    row = train_row(TrainState(), BatchStats(*range(7)), result, 1e-3, 0.5)
    assert {*row, *performance(Window(steps=1, tokens=1, flops=1, seconds=1.0), 1.0)} - {"step"} <= EXPLAINED
