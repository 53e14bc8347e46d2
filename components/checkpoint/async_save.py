"""Writing a checkpoint while training goes on: a copy in host memory, and a thread that writes it."""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.checkpoint.flat_shard import FlatShard

PATIENCE = timedelta(days=1)
"""With the disk of the slowest rank: peers that died are noticed at once."""

RUNNING, DONE, FAILED = 0.0, -1.0, 1.0
"""Such that the largest over ranks says what to do: attend to a failure, wait, or nothing."""


class HostCopy:
    """Host memory that holds one rank's tensors; its buffers serve every save (pinned beside a GPU)."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``tensors`` as they are now, in the same placements; valid until the next call."""
        copies, waits = {}, False
        copied: dict[tuple[object, ...], Tensor] = {}  # several keys may have their part in one tensor
        for key, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            waits |= local.is_cuda
            where = (local.data_ptr(), local.shape, local.stride(), local.dtype)
            if where not in copied:
                copied[where] = self.buffer(key, local).copy_(local, non_blocking=True)
            copies[key] = placed_like(tensor, copied[where])
        if waits:
            torch.cuda.current_stream().synchronize()
        return copies

    def buffer(self, key: str, like: Tensor) -> Tensor:
        found = self.buffers.get(key)
        if found is None or found.shape != like.shape:
            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self.buffers[key] = found
        return found


def placed_like(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` in the place of this rank's part of ``tensor``."""
    if isinstance(tensor, FlatShard):
        return tensor.like(local)
    if not isinstance(tensor, DTensor):
        return local
    # from_local would move it to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False)


class AsyncSaver:
    """One save at a time, in a thread. Every rank makes it, starts and finishes saves together."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        """The thread's own: collectives of the training thread go on beside it."""
        self.copy = HostCopy()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.longest_s = 0.0

    def start(self, write: Callable[[Mapping[str, Tensor]], None], tensors: Mapping[str, Tensor]) -> None:
        """Returns as soon as ``tensors`` are copied; ``write`` gets the copy, in another thread."""
        assert self.thread is None, "a save is in flight"
        copies = self.copy.of(tensors)

        def run() -> None:
            began = time.monotonic()
            try:
                write(copies)
            except BaseException as error:  # noqa: BLE001  raised again by finish
                self.error = error
            self.longest_s = max(self.longest_s, time.monotonic() - began)

        # A daemon: a process that fails must not wait for what peers never join.
        self.thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self.thread.start()

    @property
    def busy(self) -> bool:
        """Since ``start``, until ``finish``: the same on every rank."""
        return self.thread is not None

    @property
    def status(self) -> float:
        """Of this rank: RUNNING, DONE or FAILED."""
        assert self.thread is not None
        if self.thread.is_alive():
            return RUNNING
        return DONE if self.error is None else FAILED

    def finish(self) -> None:
        """Waits for the save in flight, if there is one, and raises what it raised."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error
