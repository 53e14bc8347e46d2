"""The plans of a split (order and packing per epoch): the first process to open one makes and caches it."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from components.data import packing
from components.data.packing import Plan, PlanOptions, plan_epoch
from components.data.shared_prefix import shared_lengths
from components.data.store.checked_files import DamagedFile, load_array, save_array
from components.data.store.token_sequences import Ints, TokenSequences

log = logging.getLogger(__name__)

REPEATS = "repeats.npy"
"""Name of the file, in the folder of the plans, that holds ``CachedPlans.repeats``."""


@dataclass(frozen=True, eq=False)
class CachedPlans:
    """The plans of the epochs of a split, each made when it is first needed and then kept in ``folder``.

    The other fields determine the plan of an epoch, so that it is the same in every process.
    """

    folder: Path
    tokens: TokenSequences
    options: PlanOptions
    repeats: npt.NDArray[np.float64]
    """float64, per sample: how often an epoch contains it."""
    share_prompt: bool
    firsts: Sequence[int] = (0,)
    """The first sample of each source."""

    @cached_property
    def same_number_of_rows(self) -> bool:
        """Whether all epochs are certain to have as many rows as the first one.

        The number of rows of bfd depends on the order of the samples only if there are several windows.
        """
        if (self.repeats % 1).any():
            return False
        in_order = self.options.packing != "bfd" or not self.options.shuffle
        return in_order or self.repeats.sum() <= packing.WINDOW

    @cached_property
    def same_rows(self) -> bool:
        """Whether all epochs have the same plan."""
        return not self.options.shuffle and not (self.repeats % 1).any()

    @property
    def num_samples(self) -> int:
        """Number of samples that occur in any epoch."""
        return int(np.count_nonzero(self.repeats))

    def rows(self, epoch: int) -> int:
        """Return the number of rows of an epoch."""
        if self.same_number_of_rows:
            return self.plan(0).num_rows
        return int(self._counted[epoch]) if epoch < len(self._counted) else self.plan(epoch).num_rows

    def plan(self, epoch: int) -> Plan:
        return self._open(0 if self.same_rows else epoch)

    def save_repeats(self) -> None:
        """Write ``repeats`` for the other processes of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / REPEATS
        with FileLock(self.folder / "lock"):
            try:
                load_array(path)
            except DamagedFile:
                save_array(path, self.repeats)

    def count_rows(self, epochs: int, advance: Callable[[int], object]) -> list[int]:
        """Return the number of rows of each of the first ``epochs`` epochs, without writing their plans."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            counted: list[int] = self._read_counted().tolist()
            if len(counted) < epochs:
                for epoch in range(len(counted), epochs):
                    counted.append(self._make(epoch).num_rows)
                    advance(1)
                save_array(self._rows_file, np.array(counted, np.int64))
        return counted[:epochs]

    @cached_property
    def _counted(self) -> Ints:
        return self._read_counted()

    def _read_counted(self) -> Ints:
        """Return the number of rows of each epoch that has been counted so far, from epoch 0 on."""
        try:
            return load_array(self._rows_file)
        except DamagedFile as error:
            if self._rows_file.exists():
                log.warning("%s; counted again.", error)
            return np.empty(0, np.int64)

    @property
    def _rows_file(self) -> Path:
        return self.folder / "rows.npy"

    @cached_property
    def _open(self) -> Callable[[int], Plan]:
        # While a step is in one epoch, the batch that is read ahead may be in the next one.
        return lru_cache(maxsize=2)(self._load)

    def _load(self, epoch: int) -> Plan:
        folder = self.folder / f"epoch_{epoch:05d}"
        try:
            return Plan.load(folder)
        except DamagedFile:
            self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            try:
                return Plan.load(folder)  # another process may have written it by now
            except DamagedFile as error:
                if folder.exists():
                    log.warning("%s; planned again.", error)
            plan = self._make(epoch)
            plan.save(folder)
            return Plan.load(folder)

    def _make(self, epoch: int) -> Plan:
        return plan_epoch(
            self.tokens.lengths,
            self.options,
            epoch,
            sequences_per_sample=self.tokens.sequences_per_sample,
            repeats=self.repeats,
            firsts=self.firsts,
            shared=self._shared,
        )

    @cached_property
    def _shared(self) -> Ints | None:
        return shared_lengths(self.tokens) if self.share_prompt else None


class StepIndex:
    """The steps of each epoch of ``plans``, computed only as far as they are needed."""

    def __init__(self, plans: CachedPlans, global_batch_size: int, *, drop_last: bool) -> None:
        self._plans, self._size, self._drop_last = plans, global_batch_size, drop_last
        self._firsts, self._lock = [0], Lock()  # batches are read ahead in a thread

    def locate(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of ``step``, the first step of that epoch, and the step after its last one.

        An epoch may have no step.
        """
        if self._plans.same_number_of_rows:
            steps = self._steps(0)
            epoch = step // steps
            return epoch, epoch * steps, (epoch + 1) * steps
        with self._lock:
            while self._firsts[-1] <= step:
                self._firsts.append(self._firsts[-1] + self._steps(len(self._firsts) - 1))
            epoch = bisect_right(self._firsts, step) - 1
            return epoch, self._firsts[epoch], self._firsts[epoch + 1]

    def _steps(self, epoch: int) -> int:
        return count_steps(self._plans.rows(epoch), self._size, drop_last=self._drop_last)


def count_steps(num_rows: int, global_batch_size: int, *, drop_last: bool) -> int:
    """Return the number of global batches of one epoch.

    The last one may be smaller than the others, unless it is dropped.
    """
    return (num_rows if drop_last else num_rows + global_batch_size - 1) // global_batch_size
