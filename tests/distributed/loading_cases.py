"""Rank functions of test_fsdp2_loading.py."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from components.contracts.engine import EngineOptions
from components.engines.fsdp2.engine import FSDP2Engine
from components.engines.fsdp2.mesh import local_shard
from components.models import ModelSpec
from components.optimizers import SGD
from tests.distributed.cases import fsdp2, spec


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list with the peak increase of resident memory in bytes, including mapped files."""
    found, done = [0], threading.Event()
    before = resident()

    def watch() -> None:
        while not done.wait(0.001):
            found[0] = max(found[0], resident() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def warm_up(dp: int) -> None:
    """Build a small engine, so that imports and thread pools are not attributed to the model."""
    start(spec("llama"), dp).close()


def build(folder: Path, dp: int) -> tuple[int, int]:
    """Return the peak bytes of building the engine from ``folder`` and the bytes of this rank's shards."""
    with peak_memory() as peak:
        engine = start(ModelSpec(path=str(folder), init="pretrained"), dp)
    shards = sum(local_shard(parameter).nbytes for parameter in engine.weights.values())
    engine.close()
    return peak[0], shards


def start(model: ModelSpec, dp: int) -> FSDP2Engine:
    return fsdp2(dp).build(
        model,
        SGD(momentum=0.0),
        EngineOptions(dtype=torch.float32, device="cpu"),
    )
