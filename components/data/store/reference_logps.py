"""Log-probabilities of a reference model, stored by sequence and position: computed once, for any layout.

A file holds one float32 for every token of some sequences, end to end: the log-probability of that token
given those before it, 0 if the token is not a target, NaN if it has not been computed. The first token of a
sequence is always NaN.
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

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import TrainingError
from components.data.store.checked_files import DamagedFile, load_array, save_array
from components.data.store.token_sequences import Bools, Ints

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]
RECORD = np.dtype([("place", np.int64), ("logp", np.float32)])


@dataclass(frozen=True)
class ReferenceLogps:
    """The log-probabilities in the file ``path``.

    ``lengths`` holds the number of tokens of each sequence, int64 ``[S]``.
    """

    path: Path
    lengths: Ints

    def has_all(self, sequences: Ints) -> bool:
        """Return whether all of ``sequences`` (int64 ``[n]``) have been computed."""
        # A sequence is computed as a whole except for its first token, so checking the last one suffices.
        last = self._ends[sequences] - 1
        return self._values is not None and not np.isnan(self._values[last]).any()

    def attach(self, batch: Batch, segments: Ints) -> Batch:
        """Return ``batch``, which consists of ``segments`` (int64 ``[n, 3]``), with its ``ref_logps``.

        Raises:
            TrainingError: if some log-probabilities are not in the file.
        """
        places, real = self._places(segments)
        values = np.zeros(len(places), np.float32)
        values[real] = np.nan if self._values is None else self._values[places[real]]
        logps = torch.zeros(batch.labels.shape)
        logps[occupied(batch)] = torch.from_numpy(values)
        logps[batch.labels == IGNORE] = 0  # a shared prompt is computed for only one side
        if logps.isnan().any():
            raise TrainingError(
                f"{self.path}: lacks log-probabilities of the reference model; delete it, and put "
                "data.cache_dir on a filesystem that every node sees."
            )
        return replace(batch, ref_logps=logps)

    def records(
        self, batch: Batch, segments: Ints, logps: torch.Tensor, known: Bools
    ) -> npt.NDArray[np.void]:
        """Return the records to store for ``batch``: the place of each token in the file and its ``logp``.

        Args:
            batch: the micro-batch that consists of ``segments``.
            segments: int64 ``[n, 3]``.
            logps: the log-probabilities of the reference model, like the labels of ``batch``.
            known: bool ``[S]``; sequences that are True are left out, because the file has them already.

        Returns:
            ``RECORD [m]``, one for each position of the segments that has a next token in its sequence.

        Raises:
            TrainingError: if a log-probability is NaN.
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
        """Add the records in the files ``parts`` to the file ``path``.

        The file is replaced as a whole, under a lock that excludes other writers.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            old = ReferenceLogps(self.path, self.lengths)._values  # another run may have added some
            values = np.full(self.lengths.sum(), np.nan, np.float32) if old is None else old.copy()
            for part in parts:
                records = np.fromfile(part, RECORD)
                values[records["place"]] = records["logp"]
            save_array(self.path, values)

    def _places(self, segments: Ints) -> tuple[Ints, Bools]:
        """Return, for each position of the segments, the place in the file of the next token of its sequence.

        The second array is False for positions without a next token.
        """
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
        """float32 ``[tokens]``, memory-mapped. None means that the file is missing or damaged."""
        if not self.path.exists():
            return None
        try:
            values = load_array(self.path)
        except DamagedFile as error:
            log.warning("%s; computed again.", error)
            return None
        assert values.shape == (self.lengths.sum(),), f"{self.path}: of other sequences"
        return values


def occupied(batch: Batch) -> torch.Tensor:
    """Return which positions hold a token of a sequence, bool like ``labels``."""
    filled = batch.seqlens if batch.cu_seqlens is None else batch.seqlens.sum()[None]
    return torch.arange(batch.labels.shape[1]) < filled[:, None]


@contextmanager
def part_file(folder: Path, dp_rank: int) -> Iterator[BinaryIO]:
    """Open a file for the records of one data-parallel rank.

    Ranks with the same ``dp_rank`` have the same records: the one that creates the file writes to it, and the
    others get ``os.devnull``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part_{dp_rank}"
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        path = Path(os.devnull)
    with path.open("wb") as file:
        yield file
