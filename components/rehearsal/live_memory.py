"""The live memory of a fake device: the sum of the sizes of all storages that exist."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from components.rehearsal.call_site import call_site

BLOCK = 512
"""Number of bytes to a multiple of which torch's CUDA allocator rounds up."""
STEP = 1.003
"""Factor by which the peak grows before ``at_peak`` is recorded anew, because each record takes time."""


@dataclass
class LiveMemory:
    """Bytes of the live storages of a fake device, now and at the peak.

    Storages are counted by the moment and the line of code that allocated them. ``moment`` names the part of
    the rehearsal that is running.
    """

    moment: str = "build"
    now: int = 0
    peak: int = 0
    peak_moment: str = "build"
    at_peak: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes at the peak by the moment and the line that allocated them."""
    by_moment: dict[str, int] = field(default_factory=dict)
    """Peak of each moment, in bytes."""
    paused: int = 0
    """Number of open pauses. Above 0, new storages are not counted, because a GPU would not hold them."""
    freed: Callable[[int], None] = lambda _: None
    """Function that is called with the key of each counted storage that is freed."""
    _live: dict[int, int] = field(default_factory=dict)
    _births: dict[int, tuple[str, str]] = field(default_factory=dict)
    _recorded: int = 0

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
        self._live[key] = 0
        self._births[key] = (self.moment, call_site())
        weakref.finalize(storage, self._free, key)
        self._resize(key, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage; FSDP frees and restores gathered weights in this way."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        rounded = -(-num_bytes // BLOCK) * BLOCK
        self.now += rounded - self._live[key]
        self._live[key] = rounded
        if self.now > self.by_moment.get(self.moment, 0):
            self.by_moment[self.moment] = self.now
        if self.now > self.peak:
            self.peak, self.peak_moment = self.now, self.moment
            if self.now > STEP * self._recorded:
                self._record()

    def _record(self) -> None:
        self._recorded, self.at_peak = self.now, Counter()
        for key, size in self._live.items():
            self.at_peak[self._births[key]] += size

    def _free(self, key: int) -> None:
        self.now -= self._live.pop(key, 0)
        self._births.pop(key, None)
        self.freed(key)
