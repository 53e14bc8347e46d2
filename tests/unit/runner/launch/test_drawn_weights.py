"""Frozen weights that a resume draws anew from the seed are a part of the identity of a run."""

from pathlib import Path

import pytest

from components.checkpoint import RunIdentity
from runner.config.sources import ConfigSources
from runner.launch.checks import check_launch
from tests.e2e.commands import SMALL, composed, little_data


def identity(tmp_path: Path, *overrides: str) -> RunIdentity:
    config = composed([*SMALL, f"run.output_dir={tmp_path}", "run.name=x", *overrides])
    with little_data():
        return check_launch(config, ConfigSources(), ()).inspect().identity


@pytest.mark.parametrize(
    ("options", "part"),
    [("adapter=lora", "base"), ("model.freeze=[*embed_tokens*]", "base"), ("stage=dpo", "reference")],
)
def test_another_seed_is_another_base(tmp_path: Path, options: str, part: str) -> None:
    first, again, other = (
        getattr(identity(tmp_path, options, f"run.seed={seed}"), part) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_weights_that_a_checkpoint_holds_need_no_seed(tmp_path: Path) -> None:
    assert identity(tmp_path, "run.seed=1").base is identity(tmp_path, "run.seed=2").base is None
