"""Token files, written once, as a whole or not at all, and read memory-mapped by every process."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from gzip import BadGzipFile
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from components.atomic_write import sync_folder
from components.checksum import checksum
from components.contracts.errors import ConfigError
from components.data.records.split_pairs import pair_numbers
from components.data.store.checked_files import DamagedFile, HashedFile, read_checked_json, write_checked_json
from components.data.store.token_sequences import Array, Bools, Floats, Ints
from components.json_text import as_type

LeftOut = Literal["dropped", "unsupervised", "identical"]
"""Reason why a sample is left out: it exceeds ``data.max_length``, has no target, or is a pair of equal
answers."""

_TRUNCATED, _STOP_TRAINED, _DESIRABLE = 1, 2, 4
BAD_RECORDS = "bad_records.jsonl"
"""Name of the file in a run's folder that lists the records that are left out because they cannot be read."""
_BAD = "bad_records"
"""Name of the file in a token store that has a line of JSON for each ``BadRecord``."""
_SAVE_S = 10.0  # seconds of tokenising that a kill may cost
_PERMANENT = (BadGzipFile, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


@dataclass(frozen=True)
class BadRecord:
    """A record that is left out because it cannot be read or encoded."""

    origin: str
    reason: str


def list_bad_records(folder: Path, records: Iterable[tuple[str, BadRecord]]) -> None:
    """Append bad records, given as ``(source, record)``, to the file ``BAD_RECORDS`` in ``folder``.

    Records that the file already contains are left out.
    """
    lines = dict.fromkeys(json.dumps({"source": source, **asdict(bad)}) + "\n" for source, bad in records)
    if not lines:
        return
    path = folder / BAD_RECORDS
    known = set(path.read_text().splitlines(keepends=True)) if path.exists() else set()
    with path.open("a") as file:
        file.writelines(line for line in lines if line not in known)


@dataclass(frozen=True)
class TokenChunk:
    """Some tokenised samples, end to end, and the number of samples left out."""

    tokens: npt.NDArray[np.uint32]
    mask: Bools
    """Whether each of ``tokens`` is a target of the loss."""
    lengths: Ints
    """Number of tokens of each sequence."""
    truncated: Bools
    """Per sample: whether it was truncated."""
    stop_trained: Bools
    """Per sample: whether the token that ends its last assistant turn is a target."""
    records: Ints
    """Per sample: index of its record, from 0, among the records from which the chunk was made."""
    left_out: Counter[LeftOut]
    """Number of samples left out, by reason."""
    long_prompts: int = 0
    """Number of samples, kept or left out, whose prompt without the answer exceeds ``data.max_length``."""
    cut_prompts: int = 0
    """Number of truncated samples that keep less than half of their prompt."""
    desirable: Bools | None = None
    """Per sample of unpaired data: whether it is desirable. None means other data."""
    margins: Floats | None = None
    """Per sample of ranked data: the margin that its loss subtracts from the difference of the scores. None
    means other data."""
    bad: Sequence[BadRecord] = ()
    unread: Counter[str] = field(default_factory=Counter)
    """Number of records with a value in a field that is not read, by the field's name."""
    unusual: Counter[str] = field(default_factory=Counter)
    """Number of samples, kept or left out, by what is unusual in their turns."""

    @property
    def num_records(self) -> int:
        """Number of records, including those that were left out."""
        return len(self.truncated) + self.left_out.total() + len(self.bad)


@dataclass
class StoreMeta:
    """The content of meta.json, which is next to the arrays and is written last."""

    token_type: str
    sequences_per_sample: int
    masked: bool
    """Whether there is a mask; otherwise every token is a target."""
    format: str
    unpaired: bool = False
    left_out: Counter[LeftOut] = field(default_factory=Counter)
    long_prompts: int = 0
    cut_prompts: int = 0
    bad: int = 0
    records: int = 0
    """Number of records, including those that were left out."""
    unread: Counter[str] = field(default_factory=Counter)
    unusual: Counter[str] = field(default_factory=Counter)
    sizes: dict[str, int] = field(default_factory=dict)
    """Size of each file in bytes, by the file's name."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Checksum of each file, by the file's name."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file that ``write`` wrote.

        Raises:
            CorruptTokenStore: if the file is missing, damaged or of another version.
        """
        try:
            meta: Self = as_type(cls, read_checked_json(path))
        except (DamagedFile, ValueError) as error:
            raise CorruptTokenStore(f"{path}: {error}") from error
        return meta

    def write(self, path: Path) -> None:
        write_checked_json(path, vars(self))


@dataclass(frozen=True)
class FilterResult:
    """The samples of a source that are kept or truncated, and the numbers of those that are left out."""

    format: str
    kept: Bools
    """Per sample: whether it is trained on."""
    truncated: Bools
    """Per sample: whether it is truncated."""
    stop_trained: Bools | None
    """Per sample: whether the token that ends its last assistant turn is a target. None means not known."""
    num_supervised: Ints
    """Per sequence: number of its targets."""
    records: Ints | None
    """Per sample: index of its record in the source. None means that every record is a sample."""
    num_records: int
    """Number of records, including those that are left out."""
    left_out: Counter[LeftOut]
    long_prompts: int = 0
    cut_prompts: int = 0
    bad: Sequence[BadRecord] = ()
    unread: Mapping[str, int] = field(default_factory=dict)
    unusual: Mapping[str, int] = field(default_factory=dict)


class CorruptTokenStore(Exception):
    """The folder is not a complete token store of this version."""


class WorkerLost(ConfigError):
    """A process that tokenises has died. The tokens written so far are kept for the next start."""


def is_transient(error: BaseException) -> bool:
    """Return whether ``error`` may not recur: a disk, the network, a worker process or memory failed."""
    return (
        isinstance(error, MemoryError | WorkerLost)
        or _is_transient_io(error)
        or _is_transient_io(error.__cause__)
    )


def _is_transient_io(error: BaseException | None) -> bool:
    # pyarrow raises a plain OSError without a number for a damaged file.
    damaged = type(error) is OSError and error.errno is None
    return isinstance(error, OSError) and not damaged and not isinstance(error, _PERMANENT)


class StoreWriter:
    """A writer of a token store, which is moved to ``path`` if the ``with`` block raises no error.

    Until then the store is a folder next to ``path``. If the process is killed, the tokens of at most
    ``_SAVE_S`` seconds are lost: the next writer continues after the first ``meta.records`` records. The
    caller holds a lock, so that there is one writer per path.
    """

    def __init__(
        self,
        path: Path,
        *,
        vocab_size: int,
        sequences_per_sample: int,
        masked: bool,
        format: str,
        ranked: bool = False,
    ) -> None:
        self._path, self._vocab_size, self._ranked = path, vocab_size, ranked
        self._folder = path.with_name(f"{path.name}.partial")
        self._type = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self.meta = StoreMeta(self._type.name, sequences_per_sample, masked, format)
        self._end = self.num_samples = 0
        self._is_whole = True
        """Whether the files end with a whole chunk, unlike after an interrupt of ``append``."""

    def __enter__(self) -> Self:
        self._saved = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._continue(StoreMeta.read(self._folder / "progress.json"))
        except CorruptTokenStore:
            self._open({})
            self._write("offsets", np.zeros(1, np.int64))
        return self

    def _open(self, sizes: dict[str, int]) -> None:
        names = ["tokens", "offsets", "supervised", "flags", "records", _BAD]
        names += ["mask"] if self.meta.masked else []
        names += ["margins"] if self._ranked else []
        self._files = {name: HashedFile(self._folder / name, sizes.get(name, 0)) for name in names}

    def _continue(self, saved: StoreMeta) -> None:
        """Open the files that a killed writer of the same store left, truncated to the sizes in ``saved``.

        Raises:
            CorruptTokenStore: if a file is missing or has been damaged.
        """
        try:
            self._open(saved.sizes)
        except OSError as error:
            raise CorruptTokenStore(f"{self._folder}: {error}") from error
        if {name: file.checksum for name, file in self._files.items()} != saved.checksums:
            raise CorruptTokenStore(f"{self._folder}: a checksum differs")
        self.meta, self.num_samples = saved, saved.sizes["flags"]
        self._end = saved.sizes["tokens"] // self._type.itemsize

    def append(self, chunk: TokenChunk) -> None:
        meta, self._is_whole = self.meta, False
        meta.left_out += chunk.left_out
        meta.long_prompts += chunk.long_prompts
        meta.cut_prompts += chunk.cut_prompts
        meta.unread += chunk.unread
        meta.unusual += chunk.unusual
        meta.bad += len(chunk.bad)
        for bad in chunk.bad:
            self._files[_BAD].write(json.dumps(asdict(bad)).encode() + b"\n")
        self.num_samples += len(chunk.truncated)
        first, meta.records = meta.records, meta.records + chunk.num_records
        if len(chunk.lengths):
            self._append_samples(chunk, first)
        self._is_whole = True
        if time.monotonic() - self._saved > _SAVE_S:
            self._save("progress.json")

    def _append_samples(self, chunk: TokenChunk, first: int) -> None:
        """Append the samples of ``chunk``, whose first record is record ``first`` of the store."""
        self._write("records", first + chunk.records)
        assert chunk.tokens.max() < self._vocab_size, "a token id beyond the vocabulary"
        assert self.meta.masked or chunk.mask.all()
        ends = np.cumsum(chunk.lengths)
        targets = chunk.mask.copy()
        targets[ends - chunk.lengths] = False  # nothing predicts the first token
        self._write("tokens", chunk.tokens.astype(self._type))
        self._write("offsets", self._end + ends)
        self._write("supervised", np.add.reduceat(targets, ends - chunk.lengths, dtype=np.int64))
        flags = chunk.truncated * _TRUNCATED + chunk.stop_trained * _STOP_TRAINED
        if chunk.desirable is not None:
            self.meta.unpaired = True
            flags = flags + chunk.desirable * _DESIRABLE
        self._write("flags", flags.astype(np.uint8))
        if chunk.margins is not None:
            self._write("margins", chunk.margins)
        if self.meta.masked:
            self._write("mask", chunk.mask)
        self._end += int(ends[-1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Work that a signal, a disk or a lack of memory ended is continued. After any other error, such as a
        # mistake in a record, the files are of no use.
        keep = not isinstance(error, Exception) or is_transient(error)
        try:
            if keep and self._is_whole:
                self._save("progress.json" if error else "meta.json")
        finally:
            for file in self._files.values():
                with suppress(OSError):  # a full disk; after a save nothing is left to write
                    file.close()
            if not keep:
                shutil.rmtree(self._folder)
        if error is None:
            (self._folder / "progress.json").unlink(missing_ok=True)
            shutil.rmtree(self._path, ignore_errors=True)  # a damaged one
            self._folder.replace(self._path)
            sync_folder(self._path.parent)

    def _save(self, name: str) -> None:
        """Force the files to disk, then write ``meta`` with their sizes and checksums to ``name``."""
        for file in self._files.values():
            file.sync()
        self.meta.sizes = {key: file.size for key, file in self._files.items()}
        self.meta.checksums = {key: file.checksum for key, file in self._files.items()}
        self.meta.write(self._folder / name)
        self._saved = time.monotonic()

    def _write(self, name: str, values: Array) -> None:
        self._files[name].write(values.tobytes())


@dataclass(frozen=True)
class TokenStore:
    """A token store that ``StoreWriter`` wrote."""

    path: Path
    meta: StoreMeta
    name: str = ""
    """Name of the source, for ``origin``."""
    first_record: int = 0
    """Index in the source of the store's first record, above 0 for a later chunk of a stream."""

    @classmethod
    def open(cls, path: Path, name: str = "", first_record: int = 0) -> Self:
        """Open the token store at ``path``.

        Raises:
            CorruptTokenStore: if there is none, or if a file is missing or has the wrong size.
        """
        meta = StoreMeta.read(path / "meta.json")
        try:
            sizes = {name: (path / name).stat().st_size for name in meta.sizes}
        except OSError as error:
            raise CorruptTokenStore(f"{path}: {error}") from error
        if sizes != meta.sizes:
            raise CorruptTokenStore(f"{path}: sizes {sizes}, expected {meta.sizes}")
        return cls(path, meta, name, first_record)

    def verified(self) -> Self:
        """Compare all files with their checksums, and return this store.

        The other processes of the run need not repeat this.

        Raises:
            CorruptTokenStore: if a file is not as it was written.
        """
        for name, written in self.meta.checksums.items():
            if checksum(self.path / name) != written:
                raise CorruptTokenStore(f"{self.path / name}: its checksum differs")
        return self

    @property
    def sequences_per_sample(self) -> int:
        return self.meta.sequences_per_sample

    @cached_property
    def desirable(self) -> Bools | None:
        return (self._map("flags", np.uint8) & _DESIRABLE).astype(np.bool_) if self.meta.unpaired else None

    @cached_property
    def margins(self) -> Floats | None:
        return self._map("margins", np.float64) if "margins" in self.meta.sizes else None

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self._offsets)

    def outcome(self) -> FilterResult:
        flags = self._map("flags", np.uint8)
        return FilterResult(
            format=self.meta.format,
            kept=np.ones(len(flags), np.bool_),
            truncated=(flags & _TRUNCATED).astype(np.bool_),
            stop_trained=(flags & _STOP_TRAINED).astype(np.bool_),
            num_supervised=self._map("supervised", np.int64),
            records=self._records,
            num_records=self.meta.records // (2 if self._splits_pairs else 1),
            left_out=self.meta.left_out,
            long_prompts=self.meta.long_prompts,
            cut_prompts=self.meta.cut_prompts,
            bad=self.bad(),
            unusual=self.meta.unusual,
            unread={name: -(-n // 2) if self._splits_pairs else n for name, n in self.meta.unread.items()},
        )

    def tokens(self, sequence: int, start: int, stop: int) -> Array:
        return self._tokens[slice(*self._span(sequence, start, stop))]

    def mask(self, sequence: int, start: int, stop: int) -> Bools:
        first, last = self._span(sequence, start, stop)
        return np.ones(last - first, np.bool_) if self._mask is None else self._mask[first:last]

    def origin(self, sample: int) -> str:
        return f"{self.name}:{self.first_record + self._records[sample] + 1}"

    @cached_property
    def _records(self) -> Ints:
        records = self._map("records", np.int64)
        return pair_numbers(self.meta.records)[records] if self._splits_pairs else records

    @property
    def _splits_pairs(self) -> bool:
        """Whether the samples are the answers of preference records: see ``split_pairs``."""
        return self.meta.unpaired and self.meta.format == "preference"

    def bad(self) -> list[BadRecord]:
        """Return the records that are left out because they cannot be read or encoded."""
        lines: Iterable[str] = (self.path / _BAD).read_text().splitlines()
        if self._splits_pairs:  # both answers of a record are listed
            lines = dict.fromkeys(lines)
        return [BadRecord(**json.loads(line)) for line in lines]

    def _span(self, sequence: int, start: int, stop: int) -> tuple[int, int]:
        begin, end = int(self._offsets[sequence]), int(self._offsets[sequence + 1])
        return min(begin + start, end), min(begin + stop, end)

    @cached_property
    def _offsets(self) -> Ints:
        return self._map("offsets", np.int64)

    @cached_property
    def _tokens(self) -> Array:
        return self._map("tokens", np.dtype(self.meta.token_type))

    @cached_property
    def _mask(self) -> Bools | None:
        return self._map("mask", np.bool_) if self.meta.masked else None

    def _map(self, name: str, kind: npt.DTypeLike) -> Array:
        # As a plain array: np.memmap's own class makes every small slice ten times slower.
        return np.asarray(np.memmap(self.path / name, dtype=kind, mode="r"))
