"""The loss of a small model falls in twenty steps on public data files."""

from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.commands import SMALL, rows, run_here

DATA = Path(__file__).parents[3] / "shared" / "data"
MODEL = [word for word in SMALL if word.startswith("model.")]
CASES = {
    "alpaca": ("alpaca_en_demo.json", "alpaca", ["stage=sft", "optimizer.lr=3e-3"]),
    "alpaca qlora": (
        "alpaca_en_demo.json",
        "alpaca",
        ["stage=sft", "optimizer.lr=3e-2", "adapter=qlora", "parallelism=fsdp2"],
    ),
    "dpo": ("dpo_en_demo.json", "preference", ["stage=dpo", "optimizer.lr=1e-3"]),
    "c4": ("c4_demo.jsonl", "text", ["stage=pt", "optimizer.lr=3e-3"]),
    "wiki": ("wiki_demo.txt", "text", ["stage=pt", "optimizer.lr=3e-3"]),
}


@pytest.mark.skipif(not DATA.is_dir(), reason="the folder ../shared/data is not there")
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    name, kind, words = CASES[case]
    data = ("data=files", f"data.train={DATA / name}", *words, "data.max_length=256")
    steps = ("run.max_steps=20", "run.log_every=1", "run.export=false", "run.device=cpu")
    run = run_here(tmp_path, *MODEL, *data, *steps)
    losses = [row["train/loss"] for row in rows(run, "train/loss")]
    assert len(losses) == 20
    assert mean(losses[-5:]) < mean(losses[:5])
    assert kind in capfd.readouterr().err
