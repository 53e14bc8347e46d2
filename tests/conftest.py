"""Set up a session: one thread per process, no network, its own token cache, and forked processes.

The quick part is everything without the marker ``slow``. See "Tests" in CONTRIBUTING.md.
"""

import gc
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.garbage_collection import collect_rarely
from tests import budget, forkserver

if TYPE_CHECKING:
    from tests.ranks import Ranks

# Torch reads this when it is imported. Nothing here imports it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile would start a process that imports torch, in each process that compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Without stored bytecode, every process that a test starts would compile the whole program.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
"""Ids of the tests with the marker ``slow``. The id of a function stands for all its cases."""
SLOW_FILES = frozenset(name.partition("::")[0] for name in SLOW)
SESSION = pytest.StashKey[Path]()
COLLECTED = pytest.StashKey[set[str]]()
"""Ids of all tests that were found, before a marker leaves some out."""
FROZEN = pytest.StashKey[int]()
"""Number of imported modules whose objects are exempt from garbage collection."""


def pytest_configure(config: pytest.Config) -> None:
    forkserver.leave_files_unsynced()
    collect_rarely()  # a test makes few reference cycles, and modules hold many objects
    logging.disable(logging.DEBUG)  # of libraries: torch logs four lines for every tensor of a checkpoint
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers use the folder of the controller
        folder = config.stash[SESSION] = Path(tempfile.mkdtemp(prefix="runner-tests-"))
        os.environ[budget.FOLDER] = str(folder)
        os.environ["RUNNER_CACHE"] = str(folder / "cache")
        forkserver.start()
    config.stash[COLLECTED] = set()
    budget.count_starts()


def pytest_unconfigure(config: pytest.Config) -> None:
    if SESSION in config.stash:
        shutil.rmtree(config.stash[SESSION], ignore_errors=True)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Start no workers if only single tests are named, which start sooner without them.

    In the slow part one more than there are cores, because some of its tests wait for SLURM and for signals.
    """
    if config.args and all("::" in word for word in config.args):
        return 0
    return (os.cpu_count() or 1) + 1 if config.option.markexpr == "slow" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with slow tests for the slow part."""
    if config.option.markexpr != "slow" or not collection_path.name.startswith("test_"):
        return None
    return True if str(collection_path.relative_to(config.rootpath)) not in SLOW_FILES else None


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash[COLLECTED].add(item.nodeid)
    if item.nodeid in SLOW or item.nodeid.partition("[")[0] in SLOW:
        item.add_marker(pytest.mark.slow)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long files first, so that the last worker does not start one when the others have finished.

    Files of the same folder keep their order, except those that take minutes.
    """
    if not hasattr(config, "workerinput"):
        return  # without other workers, tests run in the order of the command line
    order = ("slurm", "test_any_to_any.py", "test_tutorial.py", "test_readme.py", "rehearsal")
    order += ("test_style.py", "test_gpu_benchmark.py", "distributed", "e2e")
    items.sort(
        key=lambda item: next((i for i, part in enumerate(order) if part in item.path.parts), len(order))
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_imported(session.config)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if len(sys.modules) > item.config.stash[FROZEN] + 20:
        freeze_imported(item.config)


def freeze_imported(config: pytest.Config) -> None:
    """Exempt what modules hold from garbage collection, which engines run when they close."""
    gc.collect()
    gc.freeze()
    config.stash[FROZEN] = len(sys.modules)


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
        shown = ", ".join(f"{what} {own.total()} of {budget.BUDGET[what]}" for what, own in found.items())
        terminalreporter.write_line(f"processes of the session, of those allowed in the quick part: {shown}")
    if config.option.markexpr == "not slow":
        for line in budget.over_budget(found):
            terminalreporter.write_line(f"over budget: {line}", red=True)


@pytest.fixture(scope="session")
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Return the ids of all tests that the session has found, also of those that it does not run."""
    return request.config.stash[COLLECTED]


@pytest.fixture(scope="session")
def megatron_pair() -> "Ranks":
    """Return two ranks with Megatron."""
    from tests.ranks import Ranks

    return Ranks(2, megatron=True)


@pytest.fixture(scope="session")
def megatron_ranks() -> "Ranks":
    """Return four ranks with Megatron."""
    from tests.ranks import Ranks

    return Ranks(4, megatron=True)
