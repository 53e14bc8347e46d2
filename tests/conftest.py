"""One thread a process, no network, a token cache of the session's own, and ranks that many tests share."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Nothing here imports torch, which reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # processes of one session share what is tokenised
        config.stash[CACHE] = os.environ["RUNNER_CACHE"] = tempfile.mkdtemp(prefix="runner-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)


CACHE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def megatron_ranks() -> "Iterator[Ranks]":
    """Four that have imported Megatron, which takes longer than most tests."""
    from tests.distributed.megatron_weights_cases import import_megatron
    from tests.ranks import Ranks

    with Ranks(4) as pool:
        pool.run(import_megatron, timeout=300)
        yield pool
