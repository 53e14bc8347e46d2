"""Joining and leaving the process group of a run."""

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from components.contracts.device import DeviceKind
from components.engines.shared.torch_private import set_group_timeouts
from components.rank_info import RankInfo

PATIENCE_S = 1800.0
GRACE_S = 120.0
"""Seconds by which the timeout of collectives exceeds that of the run's watchdog, whose report contains
more."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAPPED_BYTES = 32 << 20
"""Size in bytes from which malloc maps every block separately; glibc accepts no larger value."""


def init_process_group(kind: DeviceKind) -> torch.device:
    """Create the default process group and return this rank's device; every rank calls it.

    Ranks that the runner, torchrun or srun launched meet at MASTER_ADDR:MASTER_PORT. Each call has its own
    key prefix in the store, with the number of calls of the rank since its start, because the keys of earlier
    groups remain in the store. A process that was not launched is the only rank and needs no network.
    """
    place, device = RankInfo.read(), torch.device("cpu")
    allow_open_files()
    if kind == "cpu":
        keep_freed_memory()
    else:
        device = torch.device(kind, place.local_rank)
        torch.accelerator.set_device_index(device)
    own = dist.get_default_backend_for_device(kind)
    backend = own if kind == "cpu" else f"cpu:gloo,{kind}:{own}"
    if place.launched:
        store, rank, world_size = next(dist.rendezvous("env://"))
        number = store.add(f"{place.attempt}/groups_of_rank_{rank}", 1)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{place.attempt}/group_{number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S),
        )
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may, for gloo's connection to every other rank.

    Each group has connections of its own, and some hundreds of ranks exceed the usual limit of 1,024 files.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse their own hard limit, such as macOS an infinite one.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def joined(kind: DeviceKind, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group and yield the device for building an engine.

    Apply ``set_timeouts`` when the context exits without an error. After an error, destroy the group if this
    is the only rank, so that a sweep can continue. If there are other ranks, destroying it could wait for
    them forever, and the process ends anyway.
    """
    device = init_process_group(kind)
    try:
        yield device
        set_timeouts(timeout_s)
    except BaseException:
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise


def set_timeouts(timeout_s: float) -> None:
    """Set the timeout of every group to ``timeout_s`` plus ``GRACE_S``, at least half an hour.

    NCCL groups created by libraries start with ten minutes, whatever the timeout of the default group.
    """
    set_group_timeouts(timedelta(seconds=max(PATIENCE_S, timeout_s + GRACE_S)))


def destroy_process_group() -> None:
    """Destroy every process group and free unused device memory.

    The next run of this process, and the text generation at the end of this run, measure the free memory.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def keep_freed_memory() -> bool:
    """Make glibc's malloc reuse freed blocks below ``MAPPED_BYTES`` instead of returning them to the system.

    A block that was returned is mapped and zeroed page by page at its next use, which costs as much as the
    arithmetic on an activation. Memory freed in a step is kept for the next step, and for later runs of this
    process. Larger blocks are returned: if they were kept, malloc would split them for smaller blocks, later
    large blocks would not fit, and the peak could double.

    Return False, without any effect, if the C library has no such option (musl, macOS).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))
