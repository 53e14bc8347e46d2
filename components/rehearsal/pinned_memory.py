"""Which host tensors of a rehearsal would be in pinned memory on a machine with a GPU."""

import weakref

import torch
from torch import Tensor
from torch._ops import OpOverload

from components.rehearsal.host_values import Arguments, Keywords, tensors_of


class PinnedMemory:
    """The storages of host memory that a run on a GPU would page-lock. A rehearsal does not lock them."""

    def __init__(self) -> None:
        self._storages = weakref.WeakSet[torch.UntypedStorage]()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, which may be a view, is in pinned memory."""
        return tensor.untyped_storage() in self._storages

    def follow(self, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Add the storage of ``out``, the result of ``func``, if the operator allocates pinned memory.

        That includes a copy from a GPU with ``non_blocking``, whose result torch pins.
        """
        name = func._schema.name
        copied = name == "aten::_to_copy" and kwargs.get("non_blocking") and args[0].device.type == "cuda"
        if name == "aten::_pin_memory" or kwargs.get("pin_memory") or copied:
            self._storages.update(t.untyped_storage() for t in tensors_of((out,)) if t.device.type == "cpu")
