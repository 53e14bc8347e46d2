"""Times of saves and loads, compared with a write of the same size: ``python -m benchmarks.checkpoint``.

Gloo ranks on this machine hold a random model with AdamW's moments. In each turn, all ranks write their part
of the state to a file and sync it, then save a checkpoint, then save another one in the background.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.throughput import RESULTS, report
from components.checkpoint import CheckpointManager, RunIdentity
from components.contracts.engine import EngineOptions
from components.engines.fsdp2 import FSDP2
from components.models import ModelSpec
from components.optimizers import AdamW
from runner.training.state import TrainState
from tests.distributed.cases import megatron
from tests.ranks import Ranks

HIDDEN, INTERMEDIATE, VOCABULARY = 1536, 4096, 8192
PER_LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE
BYTES = 12
"""Bytes of state per parameter: the weight and two moments in fp32."""
MIB = 2**20


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--parameters", type=float, default=500e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--engine", choices=["fsdp2", "megatron"], default="fsdp2")
    parser.add_argument("--folder", type=Path, help="where to write; its disk is what is measured")
    asked = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        work = (asked.engine, asked.ranks, round(asked.parameters), Path(folder), asked.turns)
        by_rank = Ranks(asked.ranks, megatron=asked.engine == "megatron").run(measure, *work, seconds=3600)
    found = by_rank[0] | {"peak_extra_memory": max(facts["peak_extra_memory"] for facts in by_rank)}
    print(json.dumps(found, indent=2))
    path = RESULTS / "checkpoint.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    command = [word.replace(str(asked.folder), "DIR") for word in arguments]
    facts = report("benchmarks.checkpoint", command, f"{asked.ranks} ranks on the CPU, gloo", [], {})
    facts = {key: facts[key] for key in ("command", "date", "device", "versions")} | found
    path.write_text(json.dumps(known | {asked.engine: facts}, indent=2) + "\n")


def measure(engine_name: str, ranks: int, parameters: int, folder: Path, turns: int) -> Mapping[str, Any]:
    """Time saves and loads, measure the peak memory, and return the results; all ranks call this together."""
    engine = build(engine_name, ranks, parameters)
    rank, count = dist.get_rank(), engine.describe()["parameters"]
    state, taken = BYTES * count, dict[str, list[float]]()

    def policy(name: str, *, in_background: bool) -> CheckpointManager:
        identity = RunIdentity("benchmark", "none", "adamw", None, 0, 1)
        first = rank == 0
        return CheckpointManager(folder / name, identity, 1, False, first, in_background=in_background)

    plain, background = policy("plain", in_background=False), policy("background", in_background=True)
    parts = (
        tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in engine.tensors().values()
    )
    local = list({tensor.data_ptr(): tensor for tensor in parts}.values())  # shards of q, k and v share one
    peak = 0.0
    for turn in range(turns + 1):
        now = TrainState(step=turn)
        taken.setdefault("write_s", []).append(timed(lambda: write(local, folder / f"plain_{rank}")))
        with_peak = PeakMemory()
        taken.setdefault("save_s", []).append(timed(lambda now=now: plain.save(engine, now)))
        peak = max(peak, with_peak.extra() / (state / ranks))
        taken.setdefault("stall_s", []).append(timed(lambda now=now: background.save(engine, now)))
        taken.setdefault("background_s", []).append(timed(background.wait))
    saved = folder / "plain" / f"step_{turns:08d}"
    taken["load_s"] = [timed(lambda: engine.load(saved)) for _ in range(turns + 1)]
    # The first turn is not counted, because it allocates buffers.
    seconds = {name: median(values[1:]) for name, values in taken.items()}
    return {
        "parameters": count,
        "state_mib": round(state / MIB),
        "bytes_to_state": sum(file.stat().st_size for file in saved.iterdir()) / state,
        **{name: round(value, 3) for name, value in seconds.items()},
        "all_turns_s": {name: [round(value, 3) for value in values] for name, values in taken.items()},
        "save_to_write": median(ratios(taken["save_s"], taken["write_s"])),
        "stall_to_save": median(ratios(taken["stall_s"], taken["save_s"])),
        "peak_extra_memory": peak,
    }


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio ``over / under`` of each turn except the first, which allocates buffers.

    Both values of a ratio are from the same turn, so a slow disk affects both.
    """
    return [a / b for a, b in zip(over[1:], under[1:], strict=True)]


def build(name: str, ranks: int, parameters: int) -> Any:
    layers = max(round((parameters - HIDDEN * VOCABULARY) / PER_LAYER), 1)
    architecture = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "tie_word_embeddings": True,
    }
    layout = (
        FSDP2(dp=ranks, default_dp=1, reshard_after_forward=True)
        if name == "fsdp2"
        else replace(megatron(dp=ranks), distributed_optimizer=True)
    )
    return layout.build(
        ModelSpec(architecture=architecture),
        AdamW(lr=1e-3, weight_decay=0.1, max_grad_norm=None),
        EngineOptions(torch.float32, "cpu"),
    )


def write(tensors: Sequence[Tensor], path: Path) -> None:
    """Write and sync the bytes of all tensors, which is the least that a save must do."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have finished the work."""
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


class PeakMemory:
    """A meter of the increase of this process's peak resident memory since its construction (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = psutil.Process().memory_info().rss

    def extra(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) * 1024 - self.before


if __name__ == "__main__":
    main(sys.argv[1:])
