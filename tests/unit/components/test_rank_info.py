"""Variables of a launcher that cannot be are refused by name."""

import pytest

from components.contracts.errors import ConfigError
from components.rank_info import RankInfo


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("RANK", "4"),
        ("RANK", "-1"),
        ("LOCAL_RANK", ""),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "99999"),
    ],
)
def test_a_variable_out_of_its_range_is_named(name: str, value: str) -> None:
    whole = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankInfo.read(whole).rank == 3
    with pytest.raises(ConfigError, match=rf"{name}: is '{value}' in the environment; set it to"):
        RankInfo.read(whole | {name: value})
