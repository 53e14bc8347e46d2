"""KTO from a data file to metrics, with a reference in memory and with a precomputed one."""

import json
from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, rows, run_here

RECORDS = [
    {"prompt": f"What is {n} + 1?", "completion": f"It is {n + n % 2}.", "label": n % 2 == 1}
    for n in range(10)
]


def test_a_run(tmp_path: Path) -> None:
    """Ten answers make two steps per epoch, and both kinds of reference give bitwise the same metrics."""
    (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    data = ["data=files", f"data.train={tmp_path}/answers.jsonl", f"data.cache_dir={tmp_path}/cache"]
    options = ["stage=kto", "data.packing=none", "run.global_batch_size=8", "run.export=false", *data]
    found = {}
    for reference in ("frozen", "precomputed"):
        run = run_here(tmp_path / reference, *SMALL, *options, f"stage.reference={reference}")
        found[reference] = rows(run, "train/loss")
        names = (
            "train/loss",
            "train/grad_norm",
            "train/kl",
            "train/rewards/chosen",
            "train/rewards/rejected",
        )
        found[reference] = [[row[name] for name in names] for row in found[reference]]
    assert found["precomputed"] == found["frozen"]
    assert found["frozen"][0] == [pytest.approx(0.5), found["frozen"][0][1], 0, 0, 0]
    assert found["frozen"][-1][0] < 0.5
    (source,) = json.loads((run / "audit.json").read_text())["train"]["sources"]
    assert (source["samples"], source["desirable"]) == (10, 0.5)
