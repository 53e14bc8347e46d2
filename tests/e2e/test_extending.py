"""Every example of docs/extending.md trains, from a folder outside of the package."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.commands import EXPORTING, ROOT, SMALL, call_here, newest, rows

PAGE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
MOST_LINES = 15


@pytest.mark.parametrize("title", SECTIONS)
def test_an_example_trains(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = SECTIONS[title]
    names, blocks = re.findall(r"`(my_\w+\.py)`", section), re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(names) == len(blocks) == (title != "Model family")
    for name, block in zip(names, blocks, strict=True):
        assert sum(bool(line.strip()) for line in block.splitlines()) <= MOST_LINES
        (tmp_path / name).write_text(block)
    tickets = ({"question": f"Count to {n}.", "replies": [{"text": "one more " * n}]} for n in range(1, 41))
    lines = (json.dumps({"thread": ticket}) for ticket in tickets)
    (tmp_path / "tickets.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (command,) = re.findall(r"```bash\npython -m runner (.*)\n```", section)
    exports = title in ("Data", "Engine", "Model family")
    assert call_here(*shlex.split(command), *(EXPORTING if exports else SMALL)) == 0
    assert exports == (newest(tmp_path / "outputs") / "export" / "model.safetensors").is_file()
    losses = [row["train/loss"] for row in rows(newest(tmp_path / "outputs"), "train/loss")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    if title == "Tracker":
        lines = (newest(tmp_path / "outputs") / "loss.csv").read_text().splitlines()
        assert [float(line.split(",")[1]) for line in lines[:4]] == losses


def test_a_file_makes_a_class_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML file names one key; the others have the defaults of the base class."""
    (source,) = re.findall(r"```python\n(.*?)```", SECTIONS["Loss"], re.S)
    (options,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    (tmp_path / "my_loss.py").write_text(source)
    (tmp_path / "conf/stage").mkdir(parents=True)
    (tmp_path / "conf/stage/focal.yaml").write_text(options)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert call_here("--config-dir=conf", "stage=focal", *SMALL) == 0
    assert len(rows(newest(tmp_path / "outputs"), "train/loss")) == 4
