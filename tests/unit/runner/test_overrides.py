"""Words of the command line that Hydra could not parse as they are typed."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.cli import as_override


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("train[:90%]", "'train[:90%]'"),
        ("'train[:90%]'", "'train[:90%]'"),
        ("train[:5%]+test[:5%]", "'train[:5%]+test[:5%]'"),
        ("train[:10%],train[10:20]", "'train[:10%]','train[10:20]'"),
        ("train[:10%], train[10%:]", "'train[:10%]','train[10%:]'"),
        ("[train,test]", "[train,test]"),
        ("train", "train"),
    ],
)
@pytest.mark.parametrize("key", ["data.split", "+data.eval_split"])
def test_a_part_of_a_split_needs_no_quotes(key: str, value: str, quoted: str) -> None:
    word = as_override(f"{key}={value}")
    assert word == f"{key}={quoted}"
    OverridesParser.create().parse_overrides([word])
