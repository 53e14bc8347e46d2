"""Every option composes and builds; the composed defaults are what they were."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from runner.build import build_component
from runner.cli import config_dir
from runner.provenance import Provenance

CONF = Path(config_dir())
GOLDEN = Path(__file__).parent / "golden"
OPTIONS = sorted(
    (path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name != "experiment"
)
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
NEEDED = {("model", "hf"): ["model.path=x"], ("data", "files"): ["data.train=x"]}


def test_every_file_is_covered() -> None:
    tested = len(OPTIONS) + len(EXPERIMENTS) + len(["config.yaml", "hydra/help/runner.yaml"])
    assert tested == len(list(CONF.rglob("*.yaml")))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_composes_and_every_key_is_read(group: str, option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [f"{group}={option}", *NEEDED.get((group, option), [])])
    node = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(node, dict)
    build_component(group, node, Provenance())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_composes(experiment: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        compose("config", [f"experiment={experiment}"])


@pytest.mark.parametrize(
    ("golden", "overrides"),
    [
        ("default", []),
        ("pt_fsdp2", ["stage=pt", "parallelism=fsdp2", "optimizer=sgd", "scheduler=wsd"]),
        ("dpo_files", ["stage=dpo", "data=files", "data.train=pairs.json", "model=qwen3_0_6b"]),
    ],
)
def test_the_composed_config_is_the_golden_one(golden: str, overrides: list[str]) -> None:
    """To accept a change: python -m runner --cfg job OVERRIDES > tests/conf/golden/NAME.yaml"""
    command = [sys.executable, "-m", "runner", "--cfg", "job", *overrides]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == (GOLDEN / f"{golden}.yaml").read_text()
