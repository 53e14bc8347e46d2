"""One thread a process, no network, and a token cache of the session's own."""

import os
import shutil
import tempfile

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CACHE] = os.environ["RUNNER_CACHE"] = tempfile.mkdtemp(prefix="runner-cache-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[CACHE], ignore_errors=True)


CACHE = pytest.StashKey[str]()
