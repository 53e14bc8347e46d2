"""Read Megatron's ``.bin`` and ``.idx`` files of tokenised documents in place.

The layout is that of ``megatron.core.datasets.indexed_dataset``: the index holds ``MMIDIDX``, a version, the
type of tokens, the number of sequences and of documents, then int32 lengths and int64 byte offsets.
Every sequence is a document, as in Megatron's own GPT data.

Megatron's own reader is not used. Importing it imports megatron.core into every process that reads data,
also with FSDP2: 3.3 s of processor time, 68 MiB, and 16 more classes that ``torch.load`` accepts. It would
replace few of these lines, because it rejects damaged files with bare asserts or not at all.
"""

import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from components.contracts.errors import ConfigError
from components.data.store.token_sequences import Array, Bools, Floats, Ints
from components.data.store.token_store import FilterResult
from components.home import expand_home

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_PROBED = 2**24


def indexed_prefix(path: str) -> Path | None:
    """Return the common prefix of a ``.bin`` and an ``.idx`` file, given the prefix or one of the files.

    None means that ``path`` does not name an indexed data set.
    """
    given = Path(expand_home("data.train or data.eval", path))
    if given.suffix in (".bin", ".idx"):
        return given.with_suffix("")
    # Unlike Path.exists, os.path.exists returns False if a folder may not be entered.
    return given if not os.path.exists(given) and os.path.exists(_with(given, ".idx")) else None


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """An indexed data set with the interface of ``TokenStore``; every token is a target."""

    prefix: Path
    raw_lengths: npt.NDArray[np.int32]
    """int32 ``[S]``: the number of tokens of each sequence in the file."""
    pointers: Ints
    """int64 ``[S]``: the offset of each sequence in the ``.bin`` file, in bytes."""
    buffer: Array
    """All tokens, in the dtype of the file."""
    max_length: int | None
    """Number of tokens to which sequences are truncated. None means that they are not truncated."""
    sequences_per_sample: int = 1
    desirable: Bools | None = None
    margins: Floats | None = None
    name: str = ""
    """Name of the source, for ``origin``."""

    @classmethod
    def open(cls, prefix: Path, *, max_length: int | None = None, name: str = "") -> Self:
        """Open the files ``prefix``.bin and ``prefix``.idx, memory-mapped.

        Raises:
            ConfigError: if a file is missing, is not an index of this version, or does not match the other.
        """
        for suffix in (".idx", ".bin"):
            if not _with(prefix, suffix).is_file():
                _fail(_with(prefix, suffix), "no such file", "An indexed data set is a .bin and an .idx.")
        code, count, start = _read_header(_with(prefix, ".idx"))
        index = np.asarray(np.memmap(_with(prefix, ".idx"), np.uint8, mode="r"))
        if index.nbytes < start + 12 * count:
            _fail(_with(prefix, ".idx"), f"is cut short of its {count} sequences", "Write it again.")
        lengths = np.frombuffer(index, np.int32, count, start)
        pointers = np.frombuffer(index, np.int64, count, start + 4 * count)
        kind = np.dtype(_TYPES[code])
        size = _with(prefix, ".bin").stat().st_size
        if size == 0:
            _fail(_with(prefix, ".bin"), "holds no token", "Give data.train a data set with at least one.")
        if size % kind.itemsize or size < int((pointers + lengths.astype(np.int64) * kind.itemsize).max()):
            _fail(_with(prefix, ".bin"), "does not fit its .idx", "Write both again.")
        buffer = np.asarray(np.memmap(_with(prefix, ".bin"), kind, mode="r"))
        return cls(prefix, lengths, pointers, buffer, max_length, name=name)

    @property
    def lengths(self) -> Ints:
        return np.minimum(self.raw_lengths, self.max_length or np.iinfo(np.int32).max).astype(np.int64)

    def tokens(self, sequence: int, start: int, stop: int) -> Array:
        begin, length = int(self.pointers[sequence]) // self.buffer.itemsize, self._length(sequence)
        return self.buffer[begin + min(start, length) : begin + min(stop, length)]

    def mask(self, sequence: int, start: int, stop: int) -> Bools:
        length = self._length(sequence)
        return np.ones(min(stop, length) - min(start, length), np.bool_)

    def origin(self, sample: int) -> str:
        return f"{self.name}:{sample + 1}"

    def outcome(self, *, drop: bool) -> FilterResult:
        """Return which sequences are kept and which are truncated.

        Sequences that are longer than ``max_length`` are left out with ``drop`` and truncated without it.
        """
        limit = np.iinfo(np.int32).max if self.max_length is None else self.max_length
        overlong, unsupervised = self.raw_lengths > limit, self.raw_lengths < 2
        return FilterResult(
            format="indexed",
            kept=~unsupervised & ~(overlong & drop),
            truncated=overlong & (not drop),
            stop_trained=None,
            num_supervised=np.maximum(self.lengths - 1, 0),
            records=None,
            num_records=len(unsupervised),
            left_out=Counter(
                {"dropped": int(overlong.sum()) if drop else 0, "unsupervised": int(unsupervised.sum())}
            ),
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the first 16M tokens: enough to detect a file of another tokenizer, at negligible cost.

        Raises:
            ConfigError: if one of these tokens is outside of the vocabulary.
        """
        probe = self.buffer[:_PROBED]
        low, high = int(probe.min()), int(probe.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            what = f"has the token {bad}, but the tokenizer's vocabulary is {vocab_size}"
            _fail(_with(self.prefix, ".bin"), what, "Set model.tokenizer to the one that made it.")

    def _length(self, sequence: int) -> int:
        length = int(self.raw_lengths[sequence])
        return length if self.max_length is None else min(length, self.max_length)


def _read_header(path: Path) -> tuple[int, int, int]:
    """Return the type code, the number of sequences, and the byte offset of the lengths.

    Raises:
        ConfigError: if ``path`` is not an index of this version, or has no sequence or no integers.
    """
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    fields = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0, 0, 0)
    magic, version, code, count, _ = fields
    if magic != _MAGIC or version != 1:
        _fail(path, "is not an index of Megatron's IndexedDataset, version 1", "Check data.train.")
    if code not in _TYPES:
        _fail(path, f"holds values of type code {code}, which are not tokens", "Write integers.")
    if count == 0:
        _fail(path, "holds no sequence", "Give data.train a data set with at least one.")
    return code, count, _HEADER.size


def _fail(path: Path, what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{path}: {what}. {remedy}")
