"""docs/configuration.md is the generated page, and every key of every option is in it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from runner.config.reference import page
from tests.conf.test_compose import CONF, HYDRA, NEEDED, OPTIONS, WHOLE

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.*) \|$", re.MULTILINE)
CHOICES = [
    *OPTIONS,
    *(("hydra/" + name.split("/")[0], Path(name).stem) for name in HYDRA if "help" not in name),
]


def leaves(prefix: str, node: object) -> Iterator[str]:
    """Yield the dotted keys of all values below ``node``; the shape of a model is one value."""
    if not isinstance(node, dict) or not node or prefix == "model.architecture":
        yield prefix
        return
    for name, value in node.items():
        if name != "_target_":
            yield from leaves(f"{prefix}.{name}", value)


def section(group: str, option: str) -> str:
    """Return the text of an option, with that of the options that it extends."""
    text = PAGE.read_text().partition(f"\n### `{group}={option}`\n")[2].partition("\n##")[0]
    base = re.search(r"^All keys of `(.+)=(.+)`[.,]", text, re.MULTILINE)
    return text + (section(base[1], base[2]) if base else "")


def test_the_page_is_the_generated_one() -> None:
    """To accept a change: python -m runner.config.reference conf > docs/configuration.md"""
    assert "\n".join(page(CONF)) + "\n" == PAGE.read_text()


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_key_of_an_option_is_in_its_section(group: str, option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        chosen = [f"{group}={option}", *NEEDED.get((group, option), [])]
        config = compose("config", chosen, return_hydra_config=True)
    key = group.replace("/", ".")
    node = OmegaConf.to_container(OmegaConf.select(config, key), resolve=False)
    shown = {name for name, *_ in ROW.findall(section(group, option))}
    assert set(leaves(key, node)) - {key} - shown == set()


def test_every_key_of_the_main_file_is_in_the_page() -> None:
    config = yaml.safe_load((CONF / "config.yaml").read_text())
    nodes = {
        name: node for name, node in config.items() if name not in ("defaults", "hydra", "logger", "hook")
    }
    shown = {name for name, *_ in ROW.findall(PAGE.read_text())}
    assert {key for name, node in nodes.items() for key in leaves(name, node)} - shown == set()


def test_every_set_of_changes_is_shown_whole() -> None:
    for path in (path for group in WHOLE for path in (CONF / group).rglob("*.yaml")):
        block = re.sub(r"\A(#.*\n)+", "", path.read_text())
        name = path.relative_to(CONF).with_suffix("").as_posix().split("/", 1)
        assert block in section(*name), path


def test_every_key_has_a_default_a_type_and_a_description() -> None:
    found = ROW.findall(PAGE.read_text())
    assert len(found) == PAGE.read_text().count("\n| `") > 250
    assert [row for row in found if not all(cell.strip() for cell in row)] == []


def test_a_description_says_more_than_the_allowed_values() -> None:
    for key, _, allowed, words in ROW.findall(PAGE.read_text()):
        assert set(re.findall(r"\w+", words)) - set(re.findall(r"`(\w+)`", allowed)), key
