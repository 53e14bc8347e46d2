"""One thread a process, no network, a token cache of the session's own, and processes that are forked.

The quick part is everything without the marker ``slow``. See "Tests" in CONTRIBUTING.md.
"""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import budget, forkserver

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Nothing here imports torch, which reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Ids of tests, and of functions of which all are meant, that carry the marker ``slow``."""
SESSION = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of a session share what the controller makes
        folder = config.stash[SESSION] = Path(tempfile.mkdtemp(prefix="runner-tests-"))
        os.environ[budget.FOLDER] = str(folder)
        os.environ["RUNNER_CACHE"] = str(folder / "cache")
        forkserver.start()
    budget.count_starts()


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        shutil.rmtree(config.stash[SESSION], ignore_errors=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One named test starts sooner without workers."""
    return 0 if config.args and all("::" in word for word in config.args) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid in SLOW or item.nodeid.partition("[")[0] in SLOW:
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, such that no worker is left alone with one at the end."""
    order = ("slurm", "distributed", "e2e")
    items.sort(
        key=lambda item: next((i for i, part in enumerate(order) if part in item.path.parts), len(order))
    )


def pytest_collection_finish() -> None:
    """Exempt the objects that exist now from garbage collection, which engines run when they close."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].close_all()
    if SESSION in session.config.stash and session.config.option.markexpr == "not slow":
        exceeded = budget.over_budget(budget.counts(session.config.stash[SESSION]))
        if exceeded and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = budget.counts(config.stash[SESSION])
    if any(found.values()):
        shown = ", ".join(f"{what} {number} of {budget.BUDGET[what]}" for what, number in found.items())
        terminalreporter.write_line(f"processes of the session, of those allowed in the quick part: {shown}")
    if config.option.markexpr == "not slow":
        for line in budget.over_budget(found):
            terminalreporter.write_line(f"over budget: {line}", red=True)


@pytest.fixture(scope="session")
def megatron_ranks() -> "Ranks":
    """Four, with Megatron."""
    from tests.ranks import Ranks

    return Ranks(4, megatron=True)
