"""The parity tables of MoE models, reduced to cells that together cover every kind of layout."""

import gc
from pathlib import Path

import pytest

from benchmarks.parity.parity_cells import Bench
from benchmarks.parity.parity_experts import CONTROLS, EXPERTS, LATENT
from benchmarks.parity.parity_rows import CONTROL_COLUMN, Row, Table
from tests.distributed.short_tables import shortened
from tests.ranks import Ranks

REDUCED = {
    EXPERTS: [
        ("dp2 ep2", "pt"),
        ("tp2ep2etp2 sp", "sft packed"),
        ("pp2vpp2ep2", "dpo packed"),
        ("cp2ep2", "sft packed"),
        ("dp4 ep2 sharded", "sft padded"),
        ("fsdp2 ep2", "dpo packed"),
        ("hsdp ep2", "sft packed"),
        ("fsdp2 cp2ep2", "pt"),
    ],
    LATENT: [
        ("dp2 ep2 allgather", "dpo packed"),
        ("tp2ep2etp2 sp", "sft packed"),
        ("pp2ep2", "sft packed"),
        ("fsdp2 tp2ep2", "dpo packed"),
    ],
}
CELLS = [(table, row, column) for table, cells in REDUCED.items() for row, column in cells]


@pytest.fixture(scope="module")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    """Return the benches of both tables, which use the same ranks."""
    first = Bench(tmp_path_factory.mktemp("experts"), shortened(EXPERTS))
    second = Bench(tmp_path_factory.mktemp("deepseek"), shortened(LATENT, batch=16))
    return {EXPERTS.name: first, LATENT.name: second}


def groups_left() -> int:
    """Return the number of gloo groups of this rank; each has one such thread.

    A model or a cache that stays referenced keeps its groups, whose threads use processor time. Megatron
    keeps one group of its last run.
    """
    gc.collect()
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo_tcp_loop") for name in names)


@pytest.mark.parametrize(
    ("table", "name", "on"), CELLS, ids=[f"{table.name}: {row}, {column}" for table, row, column in CELLS]
)
def test_every_layout_of_experts_trains_the_same_curve(
    benches: dict[str, Bench], table: Table, name: str, on: str
) -> None:
    column = table.column(on)
    cell, run = benches[table.name].cell(table.row(name), column)
    assert cell.passes, cell
    if name in ("dp2 ep2", "fsdp2 ep2"):
        assert max(Ranks(2, megatron=True).run(groups_left)) <= 1
    assert run.losses[-1] < 0.99 * run.losses[0] or column.is_slow, "nothing was learned"


@pytest.mark.parametrize("row", CONTROLS, ids=lambda row: row.fault)
def test_a_broken_balance_is_told(benches: dict[str, Bench], row: Row) -> None:
    cell, _ = benches[EXPERTS.name].cell(row, EXPERTS.column(CONTROL_COLUMN))
    assert cell.gradient > 1e-3
    assert not cell.passes
