"""YAML whose aliases stand for very many values, in the files of a run folder."""

from pathlib import Path

import pytest
import yaml

from components.contracts.errors import ConfigError
from components.report.runs import read_yaml
from components.yaml_text import parse_yaml
from runner.records.run_dir import read_run_config

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
ITSELF = "a: &a\n  b: *a\n"


@pytest.mark.parametrize("text", [BOMB, ITSELF])
def test_aliases_that_stand_for_too_much_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read: its aliases"):
        read_run_config(tmp_path)
    with pytest.raises(yaml.YAMLError, match="aliases"):
        read_yaml(path)


def test_aliases_of_usual_files_are_read() -> None:
    betas = [0.9, 0.95]
    config = {"optimizer": {"betas": betas}, "other": {"betas": betas}}
    text = yaml.safe_dump(config)
    assert "*id001" in text
    assert parse_yaml(text) == config
