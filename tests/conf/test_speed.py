"""Help, --cfg job and completion answer at once."""

import resource
import subprocess
import sys

import pytest

LIMIT_S = 1.5


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--cfg", "job", "stage=dpo"], ["--shell-completion", "query=bash"]]
)
def test_cpu_time(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "runner stage=")
    monkeypatch.setenv("COMP_POINT", str(len("runner stage=")))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "runner", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "dpo" in answer.lower()
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < LIMIT_S
