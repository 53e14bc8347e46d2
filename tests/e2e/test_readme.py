"""The README's own commands, and what it promises of the first one."""

import json
import math
import re
import resource
import shlex
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, call_here, command, newest, rows, run_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^(?:\$ )?((?:python -m runner|torchrun) .*?)(?:  +#.*)?$", README, flags=re.MULTILINE)
MINUTES = 3
PAIRS = [
    {"prompt": f"What is {n} + 1?", "chosen": f"It is {n + 1}.", "rejected": f"It is {n}."} for n in range(8)
]


def test_the_default_run(tmp_path: Path) -> None:
    """``python -m runner``: at least 100 steps in under three minutes of one core, and it learns.

    Not by the clock: other tests run beside it.
    """
    began = children_seconds()
    answer = run_command(command(), cwd=tmp_path, timeout=600)
    assert answer.returncode == 0, answer.stderr
    assert children_seconds() - began < MINUTES * 60
    run = newest(tmp_path / "outputs")
    losses = [row["train/loss"] for row in rows(run, "train/loss")]
    assert len(losses) >= 100
    assert losses[-1] < losses[0] - 2.5
    assert rows(run, "eval/loss")[-1]["eval/loss"] < losses[0] - 2.5
    for words in ("run folder", "checkpoint", "train loss", "eval loss", "tokens/s", "export", "completion"):
        assert words in answer.stdout


def children_seconds() -> float:
    """Processor seconds of processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 6


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_the_readme_composes(text: str, tmp_path: Path) -> None:
    """With ``--cfg job`` in place of the run: every group, option and key in it exists."""
    words = shlex.split(text)
    if "-m" in words[3:]:  # a sweep: its values one by one
        words = [*words[:3], *(w.split(",")[0] for w in words[3:] if w != "-m")]
    arguments = words[words.index("runner") + 1 :]
    shown = [] if {"--help", "--cfg"} & set(arguments) else ["--cfg", "job"]
    answer = run_command(command(*arguments, *shown), cwd=tmp_path)
    wrong = "learning_rate" in text
    assert (answer.returncode == 2) == wrong, answer.stderr
    if wrong:
        assert "nothing reads this key; did you mean" in answer.stderr


def test_a_refusal_reads_as_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command_line, message) = re.findall(
        r"^\$ python -m runner (.*parallelism.*)\n(error: .*)$", README, re.M
    )[0]
    assert call_here(*shlex.split(command_line), f"run.output_dir={tmp_path}") == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's example of a loss outside the package trains."""
    source, _ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = call_here(*SMALL, "stage._target_=my_losses.Focal", "+stage.gamma=2", f"run.output_dir={tmp_path}")
    assert code == 0
    assert len(rows(newest(tmp_path), "train/loss")) == 4


def test_a_preference_loss_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's second example, with its YAML file."""
    _, source = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "conf/stage").mkdir(parents=True)
    (tmp_path / "conf/stage/cal_dpo.yaml").write_text(config)
    (tmp_path / "my_preferences.py").write_text(source)
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    monkeypatch.syspath_prepend(str(tmp_path))
    data = ["data=files", f"data.train={tmp_path}/pairs.jsonl", f"data.cache_dir={tmp_path}/cache"]
    chosen = [f"--config-dir={tmp_path}/conf", "stage=cal_dpo"]
    assert call_here(*chosen, *SMALL, *data, f"run.output_dir={tmp_path}/out") == 0
    found = rows(newest(tmp_path / "out"), "train/loss")
    assert len(found) == 4
    # At the reference, log 2 and the squares of two targets of 5.
    assert found[0]["train/loss"] == pytest.approx(math.log(2) + 0.5 * 2 * 25, rel=1e-6)
    assert found[-1]["train/loss"] < found[0]["train/loss"]
