"""Operators for which the host waits until the GPU has finished, and copies that block the host."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._ops import OpOverload

from components.rehearsal.call_site import call_site
from components.rehearsal.host_values import Arguments, Keywords
from components.rehearsal.pinned_memory import PinnedMemory

SYNCHRONIZING = frozenset(
    f"aten::{name}"
    for name in (
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "masked_scatter_backward",
        "masked_select",
        "nonzero",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
    )
)
"""Operators whose CUDA kernels read a size or a value on the host (ATen/native/cuda)."""
INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
)
REPEAT = "aten::repeat_interleave"
"""An operator that reads the length of its result on the host, unless the length is an argument."""
MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Wait:
    """One place where the host waits for the device or blocks on a copy."""

    kind: str
    """Name of the operator. For a copy that blocks the host: ``copy to cuda`` or ``copy to cpu``."""
    moment: str
    site: str


@dataclass
class HostWaits:
    """Counts of waits and of blocking copies by place."""

    waits: Counter[Wait] = field(default_factory=Counter)
    copies: Counter[Wait] = field(default_factory=Counter)
    """Copies to the device: the host is blocked until the device has read them."""
    pinned: PinnedMemory = field(default_factory=PinnedMemory)
    moment: str = "build"

    def wait(self, kind: str) -> None:
        self.waits[Wait(kind, self.moment, call_site())] += 1

    def blocking_copy(self, kind: str) -> None:
        self.copies[Wait(kind, self.moment, call_site())] += 1

    def see(self, func: OpOverload, args: Arguments, kwargs: Keywords, target: torch.device | None) -> None:
        """Record whether the host waits in the call ``func(*args, **kwargs)``.

        ``target`` is the device that an argument of the call names. None means that no argument names one.
        """
        name = func._schema.name
        if name == "aten::_to_copy":
            if target is not None:
                self._copy(args[0], target, non_blocking=bool(kwargs.get("non_blocking")))
        elif name == "aten::copy_":
            non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            self._copy(args[1], args[0].device, non_blocking=non_blocking, into=args[0])
        elif name in SYNCHRONIZING or (name == REPEAT and kwargs.get("output_size") is None):
            self.wait(name.removeprefix("aten::"))
        elif name in INDEXING:
            for index in filter(None.__ne__, args[1]):
                self._index(name.removeprefix("aten::"), index, args[0], fills=writes_a_number(args))

    def _copy(
        self, source: Tensor, target: torch.device, *, non_blocking: bool, into: Tensor | None = None
    ) -> None:
        """Record a copy to a tensor on ``target`` if it blocks the host.

        ``into`` is that tensor if it exists. A new one in host memory is pinned by torch if ``non_blocking``.
        torch copies through pageable memory if the host tensor is not contiguous or is expanded, but not if
        it gets another dtype, which the device converts (ATen/native/cuda/Copy.cu). Here, every host tensor
        that is not contiguous counts, also the transposed ones for which torch needs no such copy.
        """
        directions, host = (source.device.type, target.type), source if source.is_cpu else into
        direct = host is None or (self.pinned.holds(host) and host.is_contiguous())
        overlaps = non_blocking and direct and (into is None or into.shape == source.shape)
        if directions == ("cuda", "cpu") and not overlaps:
            self.wait("copy to cpu")
        elif directions == ("cpu", "cuda") and not overlaps:
            self.blocking_copy("copy to cuda")

    def _index(self, name: str, index: Tensor, indexed: Tensor, *, fills: bool) -> None:
        if index.device.type == "cuda" and index.dtype in MASKS:
            if not fills:  # otherwise torch calls masked_fill, and need not know the number of places
                self.wait(f"{name} by a mask")
        elif index.device.type == "cpu" and indexed.device.type == "cuda":
            self.blocking_copy(f"{name} by an index in host memory")


def writes_a_number(args: Arguments) -> bool:
    """Return whether these arguments of an ``index_put`` write one number that is in host memory."""
    _, _, value, *accumulate = (*args, None)[:4]
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_cpu and not any(accumulate)
