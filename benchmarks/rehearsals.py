"""Time and memory of rehearsals of large runs: ``python -m benchmarks.rehearsals``.

Each command runs by itself. Its time and the largest resident memory of its processes are measured, and
compared with limits. The exit code is 1 if one of them is exceeded, or if the host would wait for the GPU
within a micro-batch more often than for the numbers of tokens of experts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULT = Path(__file__).parent / "results" / "rehearsals.json"
REHEARSED = ("run.dtype=bf16", "preflight.mode=rehearse", "preflight.device_name=H100")
FSDP2_8B = ("model=llama3_8b", "parallelism=fsdp2", "parallelism.tp=8", "parallelism.dp=8", *REHEARSED)
SEQUENCE = (
    *("model=llama3_8b", "stage=pt", "data.max_length=131072", "run.global_batch_size=1"),
    *("run.micro_batch_size=1", "parallelism.activation_checkpointing=full", *REHEARSED),
)


@dataclass(frozen=True)
class Case:
    options: tuple[str, ...]
    seconds: float
    """Limit of the time."""
    gib: float = 1.5
    """Limit of the resident memory of the largest process."""
    waits: int = 0
    """Limit of the waits of the host within micro-batches. It waits to count and select tokens of experts."""


CASES = {
    "70B, Megatron tp8 pp4 dp16, rank 511": Case(
        (
            *("model=llama3_70b", "parallelism=megatron", "parallelism.tp=8", "parallelism.pp=4"),
            *("parallelism.dp=16", "parallelism.sequence_parallel=true"),
            *("parallelism.distributed_optimizer=true", "parallelism.activation_checkpointing=full"),
            *(*REHEARSED, "preflight.rank=511"),
        ),
        90,
    ),
    "8B, FSDP2 tp8 dp8": Case((*FSDP2_8B, "parallelism.activation_checkpointing=full"), 90),
    "8B dpo, FSDP2 dp8": Case(
        (
            *("model=llama3_8b", "stage=dpo", "parallelism=fsdp2", "parallelism.dp=8"),
            *("parallelism.activation_checkpointing=full", *REHEARSED),
        ),
        90,
    ),
    "8B LoRA, FSDP2 dp8": Case(
        (
            *("model=llama3_8b", "adapter=lora", "parallelism=fsdp2", "parallelism.dp=8"),
            *("parallelism.activation_checkpointing=full", *REHEARSED),
        ),
        90,
    ),
    "deepseek_tiny, Megatron ep2": Case(("model=deepseek_tiny", "parallelism=ep2", *REHEARSED), 90, waits=9),
    "30B-A3B, FSDP2 ep8": Case(
        (
            *("model=qwen3_30b_a3b", "parallelism=fsdp2", "parallelism.dp=8", "parallelism.ep=8"),
            *("parallelism.activation_checkpointing=full", *REHEARSED),
        ),
        180,
        waits=96,
    ),
    "30B-A3B, Megatron ep8": Case(
        (
            *("model=qwen3_30b_a3b", "parallelism=megatron", "parallelism.dp=8", "parallelism.ep=8"),
            *("parallelism.distributed_optimizer=true", "parallelism.activation_checkpointing=full"),
            *REHEARSED,
        ),
        180,
        waits=288,
    ),
    "8B, 131,072 tokens, FSDP2 cp8": Case(
        (*SEQUENCE, "parallelism=fsdp2", "parallelism.dp=1", "parallelism.cp=8"), 90
    ),
    "8B, 131,072 tokens, Megatron cp8": Case(
        (*SEQUENCE, "parallelism=megatron", "parallelism.cp=8", "parallelism.distributed_optimizer=true"), 90
    ),
}


def main() -> int:
    found = {name: measure(case) for name, case in CASES.items()}
    table = Table("run", "seconds", "limit", "GiB of the process", "limit", "GiB of the GPU", "waits")
    for name, row in found.items():
        case, gpu = CASES[name], row.get("gpu_gib")
        own = (f"{row['seconds']:.0f}", f"{case.seconds:.0f}", f"{row['gib']:.2f}", f"{case.gib:g}")
        table.add_row(name, *own, "" if gpu is None else f"{gpu:.1f}", str(row.get("waits", "")))
    Console(width=120).print(table)
    facts = {
        "command": "python -m benchmarks.rehearsals",
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in ("torch", "megatron-core", "transformers")},
        "runs": {name: {"options": CASES[name].options, **row} for name, row in found.items()},
    }
    RESULT.write_text(json.dumps(facts, indent=2) + "\n")
    return int(any(exceeds(CASES[name], row) for name, row in found.items()))


def measure(case: Case) -> dict[str, Any]:
    """Run the command; return its seconds, its GiB, and the GPU memory and waits of the rehearsal."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        usage = completed([*case.options, f"run.output_dir={folder}/runs"])
        row: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1), "gib": usage}
        for path in Path(folder).glob("runs/preflight/*/preflight.json"):
            summary = json.loads(path.read_text())["rehearsal"]
            row["gpu_gib"] = round(summary["peak_bytes"] / 2**30, 2)
            row["waits"] = summary["waits_inside_microbatches"]
    return row


def completed(options: Sequence[str]) -> float:
    """Run ``python -m runner``; return the GiB of the largest of its processes."""
    process = subprocess.Popen([sys.executable, "-m", "runner", *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"python -m runner {' '.join(options)} failed.")
    return round(usage.ru_maxrss / 2**20, 2)


def exceeds(case: Case, row: dict[str, Any]) -> bool:
    return row["seconds"] > case.seconds or row["gib"] > case.gib or row.get("waits", 0) > case.waits


if __name__ == "__main__":
    sys.exit(main())
