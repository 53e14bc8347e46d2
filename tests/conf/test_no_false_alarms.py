"""Valid configurations pass preflight: every experiment and every cell of the parity table."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.parity_cells import Bench
from benchmarks.parity.parity_rows import COLUMNS, ROWS, Column, Row
from tests.conf.test_compose import EXPERIMENTS
from tests.e2e.commands import call_here, composed

DATA = {
    "finetune": ("chat", "model=tiny"),
    "pretrain_wsd": ("text", "data.eval_fraction=0.1"),
    "pretrain_sft_dpo/1_pt": ("text",),
    "pretrain_sft_dpo/2_sft": ("chat", "checkpoint.init_from=null"),
    "pretrain_sft_dpo/3_dpo": ("preference", "checkpoint.init_from=null"),
}
"""Experiment -> its kind of data, and overrides of files that do not exist before a first run."""


@cache
def layout_of(row: str) -> Any:
    """Return the layout of a row, composed once for all columns."""
    overrides = next(each.overrides for each in ROWS if each.name == row)
    return composed(["run.name=parity", *overrides])["parallelism"]


class Parity(Bench):
    """The bench of the parity table, except that each column is composed only once for all rows."""

    def config(self, row: Row, column: Column) -> dict[str, Any]:
        return self.column_config(column) | {"parallelism": layout_of(row.name)}

    @cache  # noqa: B019  it lives as long as the tests of this file
    def column_config(self, column: Column) -> dict[str, Any]:
        return super().config(Row("", ()), column)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Parity(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_cell_of_the_parity_table_passes(column: Column, bench: Bench) -> None:
    every = [row for row in ROWS if row.engine in column.engines]
    # One column has all layouts, and each of the others some of them.
    for row in every if column.name == "sft packed" else every[::4]:
        told = json.loads((bench.prepare(row, column) / "preflight.json").read_text())
        found = {name: size for name, size in told["layout"].items() if isinstance(size, int) and size > 1}
        assert found.pop("ranks", 1) == row.world_size
        assert found == {name: size for name, size in (row.dims or {}).items() if size > 1}, row.name
        microbatches = 4 if column.name == "rm packed" else 8  # its epoch has half the rows of a step
        assert told["batch"]["data_ranks"] * told["batch"]["microbatches_per_rank"] == microbatches


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_passes(experiment: str, bench: Bench, tmp_path: Path) -> None:
    kind, *others = DATA[experiment]
    data = ["data=files", f"data.train={bench.root}/{kind}.jsonl", f"data.cache_dir={bench.root}/cache"]
    chosen = [f"experiment={experiment}", *data, "data.num_workers=1", *others]
    assert call_here(*chosen, "preflight.mode=only", f"run.output_dir={tmp_path}") == 0
