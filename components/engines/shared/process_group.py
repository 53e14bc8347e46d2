"""Joining and leaving the process group of a run."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from components.engines.shared.torch_private import set_group_timeouts
from components.rank_info import RankInfo

PATIENCE_S = 1800.0
GRACE_S = 120.0
"""By which a collective outlasts the run's own watchdog, which says more."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def init_process_group(kind: Literal["cpu", "cuda"]) -> torch.device:
    """Makes the default process group and returns this rank's device; every rank calls it.

    As a launched rank (one of the runner's own workers, or torchrun's) the ranks meet at
    MASTER_ADDR:MASTER_PORT. The store counts the groups that each rank has joined, and every group uses keys
    of its own: those of a group that was left are still there.
    Otherwise this process is the only rank and needs no network.
    """
    place, device = RankInfo.read(), torch.device("cpu")
    if kind == "cpu":
        keep_freed_memory()
    else:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if place.launched:
        store, rank, world_size = next(dist.rendezvous("env://"))
        number = store.add(f"groups_of_rank_{rank}", 1)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"group_{number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S),
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


@contextmanager
def joined(kind: Literal["cpu", "cuda"], timeout_s: float) -> Iterator[torch.device]:
    """Joins, and gives the device to build an engine on; ``outlast`` when the context is left without an
    error."""
    device = init_process_group(kind)
    try:
        yield device
        wait_for_peers(timeout_s)
    except BaseException:
        exit_unsynchronized()
        raise


def wait_for_peers(timeout_s: float) -> None:
    """Collectives of every group of this process wait longer than ``timeout_s``, or half an hour.

    Groups that libraries have made start with ten minutes on NCCL, whatever the default group has.
    """
    patience = timedelta(seconds=max(PATIENCE_S, timeout_s + GRACE_S))
    set_group_timeouts(patience)


def exit_unsynchronized() -> None:
    """After a failure: leaves where this is the only rank, so that a sweep can go on in this process.

    With peers it does nothing: they may never join what leaving waits for, and the process ends anyway.
    """
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def destroy_process_group() -> None:
    """Destroys every process group, so that the next run in this process starts clean."""
    if dist.is_initialized():
        dist.destroy_process_group()


def keep_freed_memory() -> bool:
    """Makes glibc's malloc reuse large blocks instead of returning each of them to the system at once.

    A returned block is mapped and zeroed again page by page at its next use, which costs as much as the
    arithmetic on a large activation. What a step has freed is kept for the next one, and for later runs of
    this process; where lengths vary much, holes that fit nothing may add to the peak.

    Returns False where the C library has no such switch (musl, macOS); nothing else changes there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))
