"""The Megatron engine in whole runs."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, command, newest, rows, run_command, run_here

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
# The rate is low, because Adam makes a full step of the sign of a gradient that is almost zero.
SAME = (*SMALL, "optimizer.lr=1e-5")


def assert_same_curve(ours: Path, theirs: Path) -> None:
    pairs = list(zip(rows(ours, "train/loss"), rows(theirs, "train/loss"), strict=True))
    assert pairs
    for our, their in pairs:
        for key in ("train/loss", "train/grad_norm"):
            assert our[key] == pytest.approx(their[key], rel=1e-5)
        assert our["train/num_tokens"] == their["train/num_tokens"]


def test_dpo_on_pp2_has_the_curve_of_one_process(tmp_path: Path) -> None:
    """The command that a user types, whose processes import Megatron and warn of nothing."""
    pairs = [{"prompt": f"{n} + 1?", "chosen": "one more " * n, "rejected": f"{n}"} for n in range(1, 41)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    data = ("data=files", f"data.train={tmp_path}/pairs.jsonl", "data.eval_fraction=0.2")
    same = (*SAME, *data, "stage=dpo", "run.global_batch_size=8")
    answer = run_command(command("parallelism=pp2", *same), cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "UserWarning" not in answer.stderr
    assert "FutureWarning" not in answer.stderr
    ours = newest(tmp_path / "outputs")
    theirs = run_here(tmp_path / "single", *same)
    assert_same_curve(ours, theirs)
    for key in ("eval/loss", "eval/rewards/margins", "eval/rewards/accuracies"):
        assert rows(ours, key)[-1][key] == pytest.approx(rows(theirs, key)[-1][key], rel=1e-5, abs=1e-7)


def test_a_loss_of_ones_own_with_tp_and_cp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of docs/losses.md has no code for either; test_prove has a pipeline."""
    source, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "losses.md").read_text(), flags=re.DOTALL
    )
    (tmp_path / "my_losses.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    same = (*SAME, "stage._target_=my_losses.Focal", "+stage.gamma=2")
    theirs = run_here(tmp_path / "single", *same)
    assert_same_curve(run_here(tmp_path / "tp2cp2", *same, "parallelism=tp2cp2"), theirs)


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder ../shared/data is not there")
def test_dpo_of_a_real_file_on_tp2pp2(tmp_path: Path) -> None:
    data = ("data=files", f"data.train={DATA / 'dpo_en_demo.json'}", "data.max_length=256", "stage=dpo")
    same = (*SAME, *data, "run.max_steps=3")
    assert_same_curve(run_here(tmp_path / "a", *same, "parallelism=tp2pp2"), run_here(tmp_path / "b", *same))
