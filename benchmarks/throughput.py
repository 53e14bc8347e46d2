"""Tokens per second of both engines on one device: ``python -m benchmarks.throughput [OVERRIDES]``.

The engines run the same experiment in turns, each run in a separate process. The median over all steps,
except the first five of each run, is printed and written to results/throughput_<device>.json.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
EXPERIMENT = ("stage=sft", "run.max_steps=25", "run.log_every=1", "run.eval_every=0", "run.export=false")
ENGINES = {"fsdp2": "parallelism=single", "megatron": "parallelism=megatron"}
DTYPES = ("fp32", "bf16")
TURNS = 3
WARM_UP = 5


def main(overrides: Sequence[str]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {threads()} threads"
    speeds: dict[str, list[float]] = {f"{engine} {dtype}": [] for dtype in DTYPES for engine in ENGINES}
    for _ in range(TURNS):
        for dtype in DTYPES:
            for engine, layout in ENGINES.items():
                options = (*EXPERIMENT, layout, f"run.dtype={dtype}", *overrides)
                speeds[f"{engine} {dtype}"] += run(options)
    medians = {name: round(median(values)) for name, values in speeds.items()}
    table = Table("run", "tokens/s", title=device)
    for name, speed in medians.items():
        table.add_row(name, f"{speed:,}")
    Console().print(table)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    facts = report("benchmarks.throughput", overrides, device, EXPERIMENT, medians)
    (RESULTS / f"throughput_{kind}.json").write_text(json.dumps(facts, indent=2) + "\n")


def run(options: Sequence[str], warm_up: int = WARM_UP) -> list[float]:
    """Return the tokens per second of each step of one run after the first ``warm_up`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "runner", *options, f"run.output_dir={folder}"]
        subprocess.run(command, check=True, capture_output=True)
        (metrics,) = Path(folder).glob("*/*/metrics.jsonl")
        rows = map(json.loads, metrics.read_text().splitlines())
        return [row["perf/tokens_per_s"] for row in rows if "perf/tokens_per_s" in row][warm_up:]


def report(
    module: str,
    arguments: Sequence[str],
    device: str,
    experiment: Sequence[str],
    medians: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "command": " ".join([f"python -m {module}", *arguments]),
        "date": date.today().isoformat(),
        "device": device,
        "experiment": experiment,
        "versions": {name: version(name) for name in ("torch", "megatron-core", "transformers")},
        "tokens_per_s": medians,
    }


def threads() -> str:
    return os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))


if __name__ == "__main__":
    main(sys.argv[1:])
