"""The live memory of a fake device: the sum of the sizes of all storages that exist."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from components.rehearsal.call_site import call_site

BLOCK = 512
"""Number of bytes to a multiple of which torch's CUDA allocator rounds up."""


@dataclass(eq=False, slots=True)
class Held:
    """A live storage of a fake device."""

    moment: str
    """Part of the rehearsal that allocated it."""
    line: str
    """Line of code that allocated it."""
    component: str = ""
    """Its use. An empty text means that only ``moment`` and ``line`` are known."""
    size: int = 0
    """Bytes that the allocator holds for it."""


@dataclass
class LiveMemory:
    """Bytes of the live storages of a fake device, now and at the peak.

    ``moment`` names the part of the rehearsal that is running.
    """

    moment: str = "build"
    now: int = 0
    peak: int = 0
    peak_moment: str = "build"
    by_moment: dict[str, int] = field(default_factory=dict)
    """Peak of each moment, in bytes."""
    paused: int = 0
    """Number of open pauses. Above 0, new storages are not counted, because a GPU would not hold them."""
    freed: Callable[[int], None] = lambda _: None
    """Function that is called with the key of each counted storage that is freed."""
    _live: dict[int, Held] = field(default_factory=dict)
    _changed: dict[Held, int] = field(default_factory=dict)
    """Bytes at the peak of the storages that have been allocated, freed or resized since."""

    def enter(self, moment: str) -> None:
        """Set the part of the rehearsal to which memory is attributed from now on."""
        if moment != self.moment:
            self.moment = moment
            self.by_moment[moment] = max(self.now, self.by_moment.get(moment, 0))

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` until it is freed.

        Do nothing if the storage is already counted or counting is paused.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self.paused:
            return
        self._live[key] = Held(self.moment, call_site())
        weakref.finalize(storage, self._free, key)
        self._resize(self._live[key], storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage; FSDP frees and restores gathered weights in this way."""
        if storage._cdata in self._live:
            self._resize(self._live[storage._cdata], storage.nbytes())

    def held(self, tensor: torch.Tensor) -> Held | None:
        """Return the storage of ``tensor``, or None if it is not counted."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def assign(self, tensors: Iterable[torch.Tensor], component: str) -> None:
        """Set the use of the storages of ``tensors``, also for a peak that is over."""
        for tensor in tensors:
            held = self.held(tensor)
            if held is not None:
                held.component = component

    def at_peak(self) -> dict[Held, int]:
        """Return the bytes at the peak of each storage that was live."""
        sizes = {held: held.size for held in self._live.values()} | self._changed
        return {held: size for held, size in sizes.items() if size}

    def _resize(self, held: Held, num_bytes: int) -> None:
        rounded = -(-num_bytes // BLOCK) * BLOCK
        self._changed.setdefault(held, held.size)
        self.now += rounded - held.size
        held.size = rounded
        if self.now > self.by_moment.get(self.moment, 0):
            self.by_moment[self.moment] = self.now
        if self.now > self.peak:
            self.peak, self.peak_moment = self.now, self.moment
            self._changed.clear()

    def _free(self, key: int) -> None:
        held = self._live.pop(key)
        self._resize(held, 0)
        if not self._changed[held]:
            del self._changed[held]
        self.freed(key)
