"""The fixture ``refused``, which checks the requirements on every refused command."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from components.contracts.errors import MISTAKE
from runner.launch import run
from tests.e2e.commands import call_here, one_composition
from tests.patience import patience

Refused = Callable[..., str]

REMEDY = re.compile(
    r"\b(use|set|give|leave|choose|name|write|raise|lower|point|mend|correct|check|must|needs|should be|"
    r"did you mean|known:)",
    re.IGNORECASE,
)


def forbidden(*_: object) -> None:
    raise AssertionError("a rank was started")


@pytest.fixture(scope="session", autouse=True)
def composed_faster() -> Iterator[None]:
    """Read each file of options once per process; these tests compose hundreds of times."""
    with one_composition():
        yield


@pytest.fixture(scope="session")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenise the embedded data once, because a refusal's time limit does not include this."""
    folder = tmp_path_factory.mktemp("tokenised")
    for stage in ("pt", "sft", "dpo"):
        assert call_here(f"stage={stage}", "preflight.mode=only", f"run.output_dir={folder}") == 0


@pytest.fixture
def refused(
    tokenised: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Return a function that runs a command line which must be refused, and returns the message.

    The refusal must be fast, name a remedy in one or two lines, start no rank and leave no run folder.
    """
    monkeypatch.setattr(run, "run_rank", forbidden)
    monkeypatch.setattr(run, "run_with_restarts", forbidden)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        began = time.process_time()
        assert call_here(*arguments) == MISTAKE
        assert time.process_time() - began < patience(3)
        assert not dist.is_initialized()
        made = [path for path in tmp_path.glob("outputs/*/*") if path.parent.name != "preflight"]
        assert not made, "a run folder was made"
        message = capsys.readouterr().err.strip()
        assert 1 <= len(message.splitlines()) <= 2, message
        assert REMEDY.search(message), message
        return message

    return call
