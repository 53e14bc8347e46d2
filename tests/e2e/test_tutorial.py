"""The commands of docs/tutorial.md, as a reader types them.

A ``python`` in front of the real one forks its modules, with the streams and the exit code of the command,
because thirteen new processes would import for two minutes. The first start of each module but ``runner``,
whose real start test_readme.py tests, is real.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import rows, run_command

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
PYTHON = f"""#!{sys.executable}
import os
import sys
from pathlib import Path

assert sys.argv[1] == "-m", sys.argv
started = Path(__file__).with_name(sys.argv[2])
if sys.argv[2] != "runner" and not started.exists():
    started.touch()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
sys.path.insert(0, "{Path(__file__).parents[2]}")
from tests.forkserver import Process, run_module

raise SystemExit(Process(run_module, *sys.argv[2:], streams=(0, 1, 2)).wait())
"""
ANSWER = "I am a small model, trained on two records."


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Every block marked ``bash`` runs in one shell. Installing and vLLM are in blocks without that mark."""
    script = "\n".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    shim = tmp_path / "bin" / "python"
    shim.parent.mkdir()
    shim.write_text(PYTHON)
    shim.chmod(0o755)
    path = f"{shim.parent}:{os.environ['PATH']}"
    answer = run_command(["bash", "-euc", script], cwd=tmp_path, environ={"PATH": path}, seconds=400)
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    assert answer.stdout.count(f"\n{ANSWER}\n") == 2, answer.stdout  # the full model, and the adapter
    assert f"```\n{ANSWER}\n```" in PAGE
    (completion,) = map(json.loads, (tmp_path / "completions.jsonl").read_text().splitlines())
    assert completion["completion"] == "Poseidonis."
    assert (tmp_path / "report.html").stat().st_size > 10_000
    for folder in ("base", "model", "merged"):
        assert (tmp_path / folder / "model.safetensors").is_file()
    first = [
        rows(min((tmp_path / "outputs" / name).iterdir()), "train/loss")[0]["train/loss"]
        for name in ("chats", "two_ranks")
    ]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
