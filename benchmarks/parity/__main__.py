"""A comparison of the curves of all layouts with those of one process: ``python -m benchmarks.parity``.

A row of a table is a layout, and a column a kind of training. Five steps of each row on each column are
compared with the FSDP2 engine on one process with the same weights, all on CPU ranks. The exit code is 1 if
an error exceeds the bound or if a row with an injected fault passes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from benchmarks.parity.parity_cells import Bench, Cell
from benchmarks.parity.parity_experts import EXPERTS, LATENT
from benchmarks.parity.parity_muon import MUON, MUON_EXPERTS
from benchmarks.parity.parity_precision import PRECISION
from benchmarks.parity.parity_qlora import QLORA
from benchmarks.parity.parity_rows import DENSE, REFERENCE, Column, Row, Table

RESULTS = Path(__file__).parents[1] / "results"
TABLES = {table.name: table for table in (DENSE, EXPERTS, LATENT, MUON, MUON_EXPERTS, PRECISION, QLORA)}
FILES = {"dense": "parity.json"} | {name: f"parity_{name}.json" for name in TABLES if name != "dense"}
PACKAGES = ("torch", "megatron-core", "transformers")


@dataclass(frozen=True)
class Line:
    """Results of one row of the table."""

    row: Row
    cells: dict[str, Cell]
    world_size: int
    mesh: dict[str, int]
    """Mesh dimensions from run.json."""

    @property
    def as_it_should(self) -> bool:
        """Whether all cells are within the bound, or all beyond it if the row has a fault."""
        return all(cell.passes == (self.row.fault is None) for cell in self.cells.values())

    @property
    def seconds(self) -> float:
        return sum(cell.seconds for cell in self.cells.values())


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table and return the exit code."""
    asked = parse(arguments)
    asked_table = TABLES[asked.table]
    # Ranks inherit this: they run on the CPU with one thread each, even if there is a GPU.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    began, console = time.perf_counter(), Console(width=180)
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        bench = Bench(Path(root), asked_table)
        lines = [fill(bench, row, columns, console) for row, columns in chosen(asked, asked_table)]
        curves = {name: run.losses.tolist() for name, run in bench.references.items()}
    seconds = time.perf_counter() - began
    console.print(printed(lines, asked_table))
    if asked.output:
        facts = report(lines, curves, asked_table) | {"seconds": round(seconds)}
        command = " ".join(["python -m benchmarks.parity", *arguments])
        Path(asked.output).write_text(json.dumps({"command": command, **facts}, indent=2) + "\n")
    wrong = [line for line in lines if not line.as_it_should]
    for line in wrong:
        how = "is beyond a bound" if line.row.fault is None else "is broken on purpose, and passed"
        console.print(f"FAIL: {line.row.name} {how}", style="bold red")
    console.print(f"{len(lines) - len(wrong)} of {len(lines)} rows as they should be, {seconds:.0f} s")
    return 1 if wrong else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="dense", help="default: dense")
    parser.add_argument("--rows", nargs="+", help="default: all")
    parser.add_argument("--columns", nargs="+", help="default: all")
    parser.add_argument("--output", help="default: a file in results/, where the whole table is run")
    asked = parser.parse_args(arguments)
    table = TABLES[asked.table]
    for given, known in ((asked.rows, table.rows), (asked.columns, table.columns)):
        if unknown := set(given or ()) - {one.name for one in known}:
            parser.error(f"{unknown.pop()!r} is none of {', '.join(repr(one.name) for one in known)}")
    if asked.output is None and asked.rows is None and asked.columns is None:
        asked.output = RESULTS / FILES[asked.table]
    return asked


def chosen(asked: argparse.Namespace, table: Table) -> list[tuple[Row, list[Column]]]:
    """Return the requested rows with their columns, and all controls, which are always measured."""
    columns = [column for column in table.columns if asked.columns is None or column.name in asked.columns]
    rows = [row for row in table.rows if asked.rows is None or row.name in asked.rows]
    control = [table.column(table.control_column)]
    filled = [(row, [column for column in columns if column.supports(row)]) for row in rows]
    return [(row, taken) for row, taken in filled if taken] + [(row, control) for row in table.controls]


def fill(bench: Bench, row: Row, columns: Sequence[Column], console: Console) -> Line:
    cells, runs = {}, []
    for column in columns:
        cells[column.name], run = bench.cell(row, column)
        runs.append(run)
    line = Line(row, cells, runs[0].world_size, runs[0].mesh)
    console.print(f"{row.name}: {line.seconds:.0f} s", style="dim")
    return line


def printed(lines: Sequence[Line], table: Table) -> Printed:
    """Return the table for printing.

    A cell has the errors of gradients, loss and gradient norm.
    """
    result = Printed(
        title=f"{table.name}: parity with one process, bound {bounds(table)}",
        caption="gradients / loss / gradient norm",
    )
    for heading in (
        "layout",
        "ranks",
        "mesh",
        *(column.name for column in table.columns),
        "seconds",
        "verdict",
    ):
        result.add_column(heading, justify="left" if heading in {"layout", "mesh", "verdict"} else "right")
    for line in lines:
        mesh = " x ".join(f"{name} {size}" for name, size in line.mesh.items())
        cells = (cell(line, column) for column in table.columns)
        seconds = f"{line.seconds:.0f}"
        result.add_row(line.row.name, str(line.world_size), mesh, *cells, seconds, verdict(line))
    return result


def bounds(table: Table) -> str:
    """Return the bounds of the columns, each once."""
    found = dict.fromkeys(tuple(f"{bound:.0e}" for bound in column.bounds) for column in table.columns)
    return " or ".join(" / ".join(each) if len({*each}) > 1 else each[0] for each in found)


def cell(line: Line, column: Column) -> str:
    if not column.supports(line.row):
        return "refused"
    return show(line.cells.get(column.name))


def show(cell: Cell | None) -> str:
    if cell is None:
        return ""
    numbers = f"{cell.gradient:.0e} / {cell.loss:.0e} / {cell.grad_norm:.0e}"
    return numbers if cell.passes else f"[bold red]{numbers}[/]"


def verdict(line: Line) -> str:
    if line.row.fault is None:
        return "pass" if line.as_it_should else "[bold red]FAIL[/]"
    return "FAIL, as it must" if line.as_it_should else "[bold red]PASS, though broken[/]"


def report(lines: Sequence[Line], curves: dict[str, list[float]], table: Table) -> dict[str, Any]:
    """Return the table with versions and options for JSON.

    ``curves`` are the losses of the reference by column.
    """
    return {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "bounds": {column.name: column.bounds for column in table.columns},
        "experiment": table.experiment,
        "columns": {column.name: column.overrides for column in table.columns},
        "reference": {"overrides": REFERENCE.overrides, "losses": curves},
        "rows": [
            {
                "name": line.row.name,
                "overrides": line.row.overrides,
                "fault": line.row.fault,
                "world_size": line.world_size,
                "mesh": line.mesh,
                "seconds": round(line.seconds, 1),
                "as_it_should": line.as_it_should,
                "cells": {name: asdict(cell) for name, cell in line.cells.items()},
            }
            for line in lines
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
