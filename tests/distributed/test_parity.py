"""The parity table of benchmarks/parity/, reduced to rows that together cover every kind of layout."""

from dataclasses import replace

import pytest

from benchmarks.parity.parity_cells import Bench, Cell, check_mesh
from benchmarks.parity.parity_rows import CONTROL_COLUMN, CONTROLS, DENSE, ROWS, Row
from tests.distributed.short_tables import shortened

REDUCED = [
    ("hsdp", "sft packed"),
    ("fsdp2 tp2", "dpo packed"),
    ("fsdp2 cp2", "dpo shared prompt"),
    ("dp2 sharded", "dpo packed"),
    ("tp2 sp offload", "pt"),
    ("pp2vpp2", "dpo packed"),
    ("pp2vpp2", "sft padded"),
    ("cp2", "pt"),
    ("cp2 a2a", "sft packed"),
    ("tp2pp2 sp", "sft padded"),
    ("pp2dp2 sharded", "sft packed"),
    ("tp2pp2", "tr-dpo wpo"),
    ("fsdp2 tp2", "tr-dpo wpo"),
    ("cp2", "kto"),
    ("tp2pp2 sp", "sft neftune"),
    ("fsdp2 tp2cp2", "sft neftune"),
    ("cp2", "sft neftune"),
    ("dp2 sharded", "lora dpo"),
    ("fsdp2 tp2", "lora dropout"),
    ("fsdp2 cp2", "lora dropout"),
    ("hsdp", "lora dropout"),
    ("tp2pp2 sp", "lora dropout"),
    ("pp2dp2 sharded", "lora dropout"),
    ("cp2", "lora dropout"),
    ("fsdp2 tp2", "rm packed"),
    ("tp2pp2 sp", "rm packed"),
    ("fsdp2 cp2", "rm padded"),
    ("pp2vpp2", "rm padded"),
    ("cp2", "rm packed"),
    ("fsdp2 tp2", "pissa sft packed"),
    ("tp2pp2 sp", "pissa sft packed"),
    ("fsdp2 tp2", "lora rm"),
    ("tp2pp2 sp", "lora rm"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("parity"), shortened(DENSE))


@pytest.mark.parametrize(("name", "on"), REDUCED)
def test_every_layout_trains_the_same_curve(bench: Bench, name: str, on: str) -> None:
    row = DENSE.row(name)
    cell, run = bench.cell(row, DENSE.column(on))
    assert cell.passes, cell
    assert run.losses[-1] < 0.99 * run.losses[0] or DENSE.column(on).is_slow, "nothing was learned"


@pytest.mark.parametrize("row", CONTROLS, ids=lambda row: row.fault)
def test_a_broken_layout_is_told(bench: Bench, row: Row) -> None:
    """As a control, a layout with a fault fails by far, in the right place, and passes without the fault."""
    cell, _ = bench.cell(row, DENSE.column(CONTROL_COLUMN))
    assert cell.gradient > 1e-3
    assert cell.grad_norm > 1e-4
    if row.fault == "norms_not_summed":
        assert "norm" in cell.parameter
    unbroken, _ = bench.cell(replace(row, fault=None), DENSE.column(CONTROL_COLUMN))
    assert unbroken.passes, unbroken


@pytest.mark.parametrize("field", ["gradient", "loss", "grad_norm"])
@pytest.mark.parametrize("value", [1.1e-5, float("nan")])
def test_one_error_beyond_the_bound_fails_a_cell(field: str, value: float) -> None:
    within = Cell(gradient=1e-5, parameter="w", loss=1e-5, grad_norm=1e-5, seconds=1.0)
    assert within.passes
    assert not replace(within, **{field: value}).passes


def test_a_run_on_another_mesh_is_no_row() -> None:
    row = next(row for row in ROWS if row.name == "tp2pp2")
    dims = {"pp": 2, "dp": 1, "cp": 1, "tp": 2}
    facts = {"engine": "megatron", "world_size": 4, "mesh": {"dims": dims}}
    assert check_mesh(row, facts) == {"pp": 2, "tp": 2}
    for wrong in (
        facts | {"world_size": 2},
        facts | {"engine": "fsdp2"},
        facts | {"chunks_per_stage": 2},
        facts | {"mesh": {"dims": dims | {"tp": 1, "cp": 2}}},
    ):
        with pytest.raises(AssertionError, match="the run was"):
            check_mesh(row, wrong)
