"""Ranks of FSDP2. Those of Megatron are in tests/conftest.py."""

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def two() -> Ranks:
    return Ranks(2)


@pytest.fixture(scope="session")
def four() -> Ranks:
    return Ranks(4)
