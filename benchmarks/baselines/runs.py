"""Running a program once and reading its events."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.baselines.programs import Case, Program

ROOT = Path(__file__).parents[2]
SECONDS = 1800
"""Time limit of one run of a program in seconds."""
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "WANDB_DISABLED": "true",
    "DISABLE_VERSION_CHECK": "1",  # LLaMA-Factory: allow newer versions of its dependencies
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the process whose time is measured
}


@dataclass(frozen=True)
class Run:
    """Results of one run. The first step is left out of rates and counts."""

    tokens_per_cpu_second: float
    labels_per_token: float
    peak_mib: float
    first_step_seconds: float
    """Wall time from the start of the process to the end of its first step."""
    first_step_cpu_seconds: float
    """Processor time of the process until the end of its first step."""
    flops_per_token: float | None
    losses: list[float]


class Failed(Exception):
    """A failed run, with a short reason."""


def run(program: Program, case: Case, cache: Path) -> Run:
    """Run a program once and return its results.

    ``cache`` is a folder for files that a program keeps between runs, which only its first run must create.

    Raises:
        Failed: if the program fails, takes too long, or writes another number of steps than requested.
    """
    with TemporaryDirectory(prefix="peers-") as folder:
        events, output = Path(folder, "events.jsonl"), Path(folder, "output")
        output.mkdir()
        command = program.command(case, output)
        try:
            done = subprocess.run(
                command,
                env=environment(events, cache),
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(f"failed: {error}") from error
        steps = read_steps(events)
        if done.returncode or len(steps) != case.steps:
            (cache / f"{program.name}-{case.work.name}.log").write_text(done.stdout + done.stderr)
            lines = (done.stderr.strip() or "no message").splitlines()
            raise Failed(f"failed: {len(steps)} of {case.steps} steps, exit {done.returncode}: {lines[-1]}")
    return summary(steps)


def environment(events: Path, cache: Path) -> dict[str, str]:
    """Return environment variables for one thread, no network, no GPU, and separate caches."""
    own = {
        "OMP_NUM_THREADS": "1",
        "THREADS": "1",
        "BENCH_OUT": str(events),
        "PYTHONPATH": str(ROOT),
        "RUNNER_CACHE": str(cache / "runner"),
        "HF_HOME": str(cache / "huggingface"),
    }
    return os.environ | QUIET | own


def read_steps(events: Path) -> list[dict[str, Any]]:
    lines = events.read_text().splitlines() if events.is_file() else []
    return [event for event in map(json.loads, lines) if event["ev"] == "step"]


def summary(steps: Sequence[dict[str, Any]]) -> Run:
    first, rest = steps[0], steps[1:]
    tokens = sum(step["tok"] for step in rest)
    flops = sum(step["flops"] for step in rest) / tokens if "flops" in first else None
    return Run(
        tokens_per_cpu_second=tokens / (steps[-1]["cpu"] - first["cpu"]),
        labels_per_token=sum(step["lab"] for step in rest) / tokens,
        peak_mib=steps[-1]["rss"],
        first_step_seconds=first["t"],
        first_step_cpu_seconds=first["cpu"],
        flops_per_token=flops,
        losses=[step["loss"] for step in steps],
    )


def medians(runs: Sequence[Run]) -> Run:
    """Return the medians of rates, times and memory, with the losses and counts of the first run."""
    values = {
        name: median(getattr(run, name) for run in runs)
        for name in (
            "tokens_per_cpu_second",
            "peak_mib",
            "first_step_seconds",
            "first_step_cpu_seconds",
        )
    }
    return replace(runs[0], **values)
