"""Joining and leaving the process group of a run."""

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from components.engines.host_memory import keep_freed_memory


def join(kind: Literal["cpu", "cuda"]) -> torch.device:
    """Makes the default process group and returns this rank's device; every rank calls it.

    With WORLD_SIZE in the environment (the runner's own workers, torchrun) the ranks meet at
    MASTER_ADDR:MASTER_PORT. Without it this process is the only rank and needs no network.
    """
    device = torch.device("cpu")
    if kind == "cpu":
        keep_freed_memory()
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def leave_alone() -> None:
    """After a failure: leaves where this is the only rank, so that a sweep can go on in this process.

    With peers it does nothing: they may never join what leaving waits for, and the process ends anyway.
    """
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def leave() -> None:
    """Destroys every process group, so that the next run in this process starts clean."""
    if dist.is_initialized():
        dist.destroy_process_group()
