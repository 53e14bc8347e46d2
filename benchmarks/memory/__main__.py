"""The estimated memory of a rank against the measured peak: ``python -m benchmarks.memory``.

The second step of each work item is measured in its layouts on CPU ranks, or with ``--device cuda`` on one
GPU (only layouts of one rank). The exit code is 1 if the error of an estimate exceeds the bound.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.memory.memory_cells import BOUND, GPU_WORKS, LAYOUTS, WORKS, Bench, Cell

RESULTS = {
    "cpu": Path(__file__).parents[1] / "results" / "memory.json",
    "cuda": Path(__file__).parents[1] / "results" / "memory_cuda.json",
}
PACKAGES = ("torch", "megatron-core", "transformers")


def main(arguments: Sequence[str]) -> int:
    """Measure and print all cells and return the exit code."""
    asked = parse(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    began, console, cells = time.perf_counter(), Console(width=140), []
    for cell in measured(asked, console):
        cells.append(cell)
        if asked.output:
            write(Path(asked.output), cells, shlex.join(["python", "-m", "benchmarks.memory", *arguments]))
    console.print(table(cells))
    missed = [cell for cell in cells if not cell.passes]
    seconds = time.perf_counter() - began
    console.print(f"{len(cells) - len(missed)} of {len(cells)} within {BOUND:.0%}, {seconds:.0f} s")
    return 1 if missed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), help="default: all")
    parser.add_argument("--works", nargs="+", choices=[*WORKS, *GPU_WORKS], help="default: all of the device")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", help=f"default: results/{RESULTS['cpu'].name}, where all is run")
    asked = parser.parse_args(arguments)
    if asked.output is None and asked.layouts is None and asked.works is None:
        asked.output = RESULTS[asked.device]
    return asked


def measured(asked: argparse.Namespace, console: Console) -> Iterator[Cell]:
    bench = Bench(asked.device)
    for layout, work in product(asked.layouts or LAYOUTS, asked.works or bench.works):
        wanted = asked.layouts is not None or layout in bench.works[work].layouts
        if wanted and bench.can_run(layout):
            began, cells = time.perf_counter(), bench.cells(layout, work)
            yield from cells
            ratios = ", ".join(f"{mib(cell.estimate)} / {mib(cell.held)}" for cell in cells)
            seconds = time.perf_counter() - began
            console.print(f"{layout}, {work}: {ratios} MiB, {seconds:.0f} s", style="dim")


def table(cells: Sequence[Cell]) -> Table:
    result = Table(title=f"peak memory of a rank, MiB; bound {BOUND:.0%}")
    for heading in ("layout", "work", "stage", "estimate", "held", "ratio", "parts of the estimate"):
        result.add_column(heading, justify="right" if heading in {"estimate", "held", "ratio"} else "left")
    for cell in cells:
        ratio = f"{cell.ratio:.2f}" if cell.passes else f"[bold red]{cell.ratio:.2f}[/]"
        parts = ", ".join(f"{name} {mib(size)}" for name, size in cell.parts.items())
        result.add_row(
            cell.layout, cell.work, str(cell.stage), mib(cell.estimate), mib(cell.held), ratio, parts
        )
    return result


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def write(path: Path, cells: Sequence[Cell], command: str) -> None:
    """Write the cells, versions and options to a file.

    Other cells in the file stay.
    """
    before = json.loads(path.read_text()) if path.is_file() else {"commands": [], "cells": []}
    found = [asdict(cell) | {"estimate": cell.estimate, "ratio": round(cell.ratio, 3)} for cell in cells]
    taken = {(cell.layout, cell.work) for cell in cells}
    others = [cell for cell in before["cells"] if (cell["layout"], cell["work"]) not in taken]
    names = {cell["work"] for cell in [*others, *found]}
    used = {name: work for name, work in (WORKS | GPU_WORKS).items() if name in names}
    facts = {
        "commands": list(dict.fromkeys([*before["commands"], command])),
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "bound": BOUND,
        "layouts": LAYOUTS,
        "works": {n: {"overrides": w.overrides, "workload": asdict(w.workload)} for n, w in used.items()},
        "cells": others + found,
    }
    path.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
