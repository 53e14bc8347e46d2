"""All measurements on one GPU in one call: ``python -m benchmarks.gpu [--minutes 8.5] [--only PART ...]``.

The tests of tests/gpu; curves of both engines against those of the CPU; and speed, MFU and peak memory of two
shapes of Llama with packed rows of 4096 tokens, for our engines (with the peak of a rehearsal) and other
programs that are installed.
Each single measurement is a cell. A cell that fails, lacks a package or has no time left is recorded with the
reason, and the others are measured. The results file is written after each cell. Results of cells that a call
does not measure are kept in the file, so several calls can share the work.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from benchmarks.gpu.gpu_cells import Cell, Facts, Failed, Place, cells

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "liger-kernel",
    "flash-attn",
    "accelerate",
    "trl",
)
LEAST = 15.0
"""Seconds that must be left for a cell to begin."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record all cells; return the exit code, 1 if a cell failed, 2 without a GPU."""
    asked = parse(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("error: --device: is cuda, but there is no GPU; use --device cpu.", file=sys.stderr)
        return 2
    end, console = time.monotonic() + 60 * asked.minutes, Console(width=140)
    whole: Facts = json.loads(asked.output.read_text()) if asked.output.is_file() else {}
    done: Facts = whole.get("cells", {})
    command = " ".join(["python -m benchmarks.gpu", *arguments])
    failed = False
    with TemporaryDirectory(prefix="gpu-") as folder:
        place = Place(asked.device, Path(folder))
        for cell in cells(place):
            if asked.only and not any(part in cell.name for part in asked.only):
                continue
            done[cell.name] = {"command": command, **measured(cell, place, end - time.monotonic())}
            failed |= done[cell.name]["status"] == "failed"
            console.print(cell.name, {k: v for k, v in done[cell.name].items() if k != "command"})
            facts = {"date": date.today().isoformat(), "device": device(asked.device), "versions": versions()}
            asked.output.write_text(json.dumps(facts | {"cells": done}, indent=2) + "\n")
    return int(failed)


def measured(cell: Cell, place: Place, left: float) -> Facts:
    """Measure a cell within its time limit and ``left`` seconds; return its status and its facts."""
    if (lacking := cell.missing()) is not None:
        return {"status": "skipped", "reason": lacking}
    if left < LEAST:
        return {"status": "skipped", "reason": "no time left"}
    began = time.monotonic()
    try:
        facts = cell.measure(place, min(cell.seconds, left))
    except Failed as error:
        return {"status": "failed", "reason": error.args[0]}
    return {"status": "done", "seconds": round(time.monotonic() - began, 1), **facts}


def device(kind: str) -> str:
    return torch.cuda.get_device_name() if kind == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for all cells together")
    parser.add_argument("--only", nargs="+", metavar="PART", help="cells whose names contain one of these")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
