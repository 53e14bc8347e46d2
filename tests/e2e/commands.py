"""Running the real command, in this process (fast) or in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import cli

SMALL = (
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.head_dim=16",
    "data.max_length=128",
    "run.max_steps=4",
    "run.log_every=1",
    "run.device=cpu",
    "run.sample_tokens=4",
)
"""The default experiment, made small."""


def run_here(folder: Path, *overrides: str) -> Path:
    """Runs in this process with outputs under ``folder``; returns the newest run folder."""
    code = call_here(f"run.output_dir={folder}", *overrides)
    assert code == 0, f"exit code {code}"
    return newest(folder)


def call_here(*arguments: str) -> int:
    argv, sys.argv = sys.argv, ["runner", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        return cli.command()
    finally:
        sys.argv = argv


def newest(folder: Path) -> Path:
    return max(folder.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime_ns).parent


def rows(run: Path, key: str = "step") -> list[dict[str, Any]]:
    """Rows of metrics.jsonl that have ``key``."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def curve(run: Path, *, without: tuple[str, ...] = ("perf/",)) -> list[dict[str, Any]]:
    """Every row without what may differ between equal runs."""
    return [{k: v for k, v in row.items() if not k.startswith(without)} for row in rows(run)]


def command(*arguments: str, module: bool = True) -> list[str]:
    return [sys.executable, *(["-m", "runner"] if module else []), *arguments]


def run_command(
    arguments: list[str], *, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environ or {})
    return subprocess.run(
        arguments, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
