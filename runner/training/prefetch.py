"""Prefetching of global batches."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from components.contracts.batch import Batch
from components.contracts.data import DataLoader


class Prefetched:
    """The micro-batches of a ``DataLoader``. Those of the next step are built during the current one.

    If ``device`` is not the CPU, they are in page-locked memory, from which they can be copied to it
    asynchronously. The micro-batches of a step that was not prefetched (the first, or one after a jump) are
    built on request.
    """

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._loader, self._pin = loader, device.type != "cpu"
        # A new thread begins on GPU 0, where page-locking could create a CUDA context of every local rank.
        select = torch.accelerator.set_device_index if self._pin else lambda _: None
        self._thread = ThreadPoolExecutor(1, "prefetch", initializer=select, initargs=(device,))
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def microbatches(self, step: int) -> list[Batch]:
        foreseen, self._ahead = self._ahead, None
        made = foreseen[1] if foreseen is not None and foreseen[0] == step else self._make(step)
        batches = made.result()
        if step + 1 < self._loader.num_steps:
            self._ahead = step + 1, self._make(step + 1)
        return batches

    def close(self) -> None:
        self._loader.close()
        self._thread.shutdown()

    def _make(self, step: int) -> Future[list[Batch]]:
        return self._thread.submit(self._collate, step)

    def _collate(self, step: int) -> list[Batch]:
        batches = self._loader.microbatches(step)
        return [batch.pin_memory() for batch in batches] if self._pin else batches
