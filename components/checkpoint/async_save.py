"""Writing a checkpoint while training continues: a thread writes a copy of the state in host memory."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from components.checkpoint.flat_shard import FlatShard

PATIENCE = timedelta(days=1)
"""Timeout of the collectives of a save, which wait for the rank with the slowest disk. A rank that died is
noticed at once, not after this timeout."""

RUNNING, DONE, FAILED = 0.0, -1.0, 1.0
"""States of a save. The maximum over ranks is FAILED if any rank failed, else RUNNING until all are DONE."""


class HostCopy:
    """A copy of one rank's tensors in host memory. Its buffers are reused by every save (pinned for GPUs)."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy ``tensors`` to host memory with the same placements.

        The copy is valid until the next call.
        """
        copies, waits = {}, False
        copied: dict[Hashable, Tensor] = {}  # several keys may share one tensor
        for key, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            waits |= local.device.type != "cpu"
            where = view_of(local)
            if where not in copied:
                copied[where] = self.buffer(key, local).copy_(local, non_blocking=True)
            copies[key] = wrap_like(tensor, copied[where])
        if waits:
            torch.accelerator.current_stream().synchronize()
        return copies

    def buffer(self, key: str, like: Tensor) -> Tensor:
        found = self.buffers.get(key)
        if found is None or found.shape != like.shape:
            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type != "cpu")
            self.buffers[key] = found
        return found


def view_of(local: Tensor) -> Hashable:
    """Return a key that is equal for equal views of one piece of memory, as shards of fused weights have."""
    storage = StorageWeakRef(local.untyped_storage())  # fake tensors have no addresses
    return storage, local.storage_offset(), local.shape, local.stride(), local.dtype


def wrap_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as this rank's shard of a tensor that is distributed like ``tensor``.

    If ``tensor`` is a plain tensor, this is ``local`` itself.
    """
    if isinstance(tensor, FlatShard):
        return tensor.like(local)
    if not isinstance(tensor, DTensor):
        return local
    # from_local would move it to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False)


class AsyncSaver:
    """A thread for one save at a time. Ranks must create it, start saves and finish them together."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        """Process group of the thread, because collectives of the training thread run at the same time."""
        self.copy = HostCopy()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.longest_s = 0.0

    def start(self, write: Callable[[Mapping[str, Tensor]], None], tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors``, then call ``write`` with the copy in another thread."""
        assert self.thread is None, "a save is in flight"
        copies = self.copy.of(tensors)

        def run() -> None:
            began = time.monotonic()
            try:
                write(copies)
            except BaseException as error:  # noqa: BLE001  raised again by finish
                self.error = error
            self.longest_s = max(self.longest_s, time.monotonic() - began)

        # A daemon: a process that fails must not wait for collectives that other ranks never join.
        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()

    @property
    def busy(self) -> bool:
        """Whether a save was started and not yet finished; the same on every rank."""
        return self.thread is not None

    @property
    def status(self) -> float:
        """State of this rank's save: RUNNING, DONE or FAILED."""
        assert self.thread is not None
        if self.thread.is_alive():
            return RUNNING
        return DONE if self.error is None else FAILED

    def finish(self) -> None:
        """Wait for the save in flight, if any, and raise the exception that it raised."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error
