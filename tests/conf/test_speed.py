"""Help, --cfg job and completion are fast, because they import no slow module."""

import re
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "megatron", "peft", "datasets", "numpy", "pandas"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--cfg", "job", "stage=dpo"], ["--shell-completion", "query=bash"]]
)
def test_little_is_imported(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "runner stage=")
    monkeypatch.setenv("COMP_POINT", str(len("runner stage=")))
    command = [sys.executable, "-X", "importtime", "-m", "runner", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dpo" in answer.stdout.lower()
    modules = set(re.findall(r"^import time: .*\| +(\S+)$", answer.stderr, flags=re.MULTILINE))
    assert "hydra" in modules, "the listing is read"
    assert not modules & HEAVY
    assert len(modules) < 600
