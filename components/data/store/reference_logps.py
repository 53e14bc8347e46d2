"""Log-probabilities of a reference model, kept by sequence and position: computed once, for any layout.

A file holds one float32 for every token of some sequences, end to end: the log-probability of that token
after those before it, 0 where it is no target, NaN where nobody has asked yet.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock

from components.atomic_write import atomic_file
from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import TrainingError
from components.data.store.token_store import Bools, Ints

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
RECORD = np.dtype([("place", np.int64), ("logp", np.float32)])


@dataclass(frozen=True)
class ReferenceLogps:
    """The file at ``path`` about sequences of ``lengths`` tokens (int64 ``[S]``)."""

    path: Path
    lengths: Ints

    def has_all(self, sequences: Ints) -> bool:
        """Whether all of ``sequences`` (int64 ``[n]``) have been computed."""
        # A sequence is computed whole, and its first token never: so the last one tells.
        last = self._ends[sequences] - 1
        return self._values is not None and not np.isnan(self._values[last]).any()

    def attach(self, batch: Batch, segments: Ints) -> Batch:
        """``batch``, which consists of ``segments`` (int64 ``[n, 3]``), with its ``ref_logps``.

        Raises:
            TrainingError: some of them are not in the file.
        """
        places, real = self._places(segments)
        values = np.zeros(len(places), np.float32)
        values[real] = np.nan if self._values is None else self._values[places[real]]
        logps = torch.zeros(batch.labels.shape)
        logps[occupied(batch)] = torch.from_numpy(values)
        logps[batch.labels == IGNORE] = 0  # a shared prompt has been computed for one side alone
        if logps.isnan().any():
            raise TrainingError(
                f"{self.path}: lacks log-probabilities of the reference model; delete it, and put "
                "data.cache_dir on a filesystem that every node sees."
            )
        return replace(batch, ref_logps=logps)

    def records(
        self, batch: Batch, segments: Ints, logps: torch.Tensor, known: Bools
    ) -> npt.NDArray[np.void]:
        """``RECORD [n]``: what ``logps`` (like the labels of ``batch``) says of the tokens of ``segments``.

        ``known``: bool ``[S]``, sequences that are left out.

        Raises:
            TrainingError: it is not a number.
        """
        places, real = self._places(segments)
        found = np.empty(len(places), RECORD)
        found["place"], found["logp"] = places, logps.float().cpu()[occupied(batch)].numpy()
        if np.isnan(found["logp"]).any():
            raise TrainingError(
                "stage.reference: the reference model gives log-probabilities that are not numbers; look "
                "at its weights, or use run.dtype=fp32."
            )
        spans = segments[:, 2] - segments[:, 1]
        return found[real & ~np.repeat(known[segments[:, 0]], spans)]

    def merge(self, parts: Sequence[Path]) -> None:
        """Adds the records in ``parts``; the file is replaced whole, and other writers wait."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            old = ReferenceLogps(self.path, self.lengths)._values  # another run may have added some
            values = np.full(self.lengths.sum(), np.nan, np.float32) if old is None else old.copy()
            for part in parts:
                records = np.fromfile(part, RECORD)
                values[records["place"]] = records["logp"]
            with atomic_file(self.path) as file:
                np.save(file, values)

    def _places(self, segments: Ints) -> tuple[Ints, Bools]:
        """Of every position of the segments, end to end: where the token after it is, and if there is one."""
        ends = self._ends[segments[:, 0]]
        spans = segments[:, 2] - segments[:, 1]
        first = ends - self.lengths[segments[:, 0]] + segments[:, 1] + 1
        begins = np.cumsum(spans) - spans
        places = np.arange(spans.sum()) + np.repeat(first - begins, spans)
        return places, places < np.repeat(ends, spans)

    @cached_property
    def _ends(self) -> Ints:
        return np.cumsum(self.lengths)

    @cached_property
    def _values(self) -> Floats | None:
        """float32 ``[tokens]``, memory-mapped; None: there is no such file, or it is damaged."""
        if not self.path.exists():
            return None
        try:
            values = np.asarray(np.load(self.path, mmap_mode="r"))
        except (OSError, ValueError) as error:
            log.warning("%s: is damaged (%s); computed again.", self.path, error)
            return None
        assert values.shape == (self.lengths.sum(),), f"{self.path}: of other sequences"
        return values


def occupied(batch: Batch) -> torch.Tensor:
    """bool like ``labels``: the positions that hold a token of a sequence."""
    filled = batch.seqlens if batch.cu_seqlens is None else batch.seqlens.sum()[None]
    return torch.arange(batch.labels.shape[1]) < filled[:, None]


@contextmanager
def part_file(folder: Path, dp_rank: int) -> Iterator[BinaryIO]:
    """To write the share of one data rank to.

    Ranks that split a model between them have the same numbers: the first to come writes them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part_{dp_rank}"
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        path = Path(os.devnull)
    with path.open("wb") as file:
        yield file
