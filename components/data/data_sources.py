"""The sources of samples: files, data sets of the Hugging Face hub, and the embedded data."""

import json
import os
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import Protocol

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.data.demo import SplitName, stdlib_records
from components.data.records.columns import check_columns, renamed
from components.data.records.formats import KINDS, detect
from components.data.records.hub_records import HubDataset
from components.data.records.options import Format, RecordError, RecordOptions
from components.data.records.record_files import (
    Item,
    Record,
    Records,
    Unreadable,
    data_files,
    matching_files,
    read_records,
    warn_of_unread_files,
)
from components.data.records.samples import Sample
from components.data.store.digests import digest, file_digest
from components.home import expand_home

STAGES = {"text": "pt", "chat": "sft", "preference": "dpo", "ranked": "rm", "unpaired": "kto"}

_PROBED = 500  # first records in which the format and the fields of data.columns are looked for

SourceItem = tuple[Record | Sample | Unreadable, str]
"""A record or a sample with its origin."""


@dataclass(frozen=True)
class SourceItems:
    """The content of a source."""

    format: str
    items: Iterator[SourceItem]
    options: RecordOptions = field(default_factory=RecordOptions)
    """Options by which records become samples, with the format resolved. They do not apply to items that are
    samples already."""
    fraction: Callable[[], float | None] = lambda: None
    """Function that returns the share of the source that has been read, 0 to 1. None means not known."""
    splits_pairs: bool = False
    """Whether ``split_pairs`` makes two samples of each item, a preference record for ``stage=kto``."""


class Source(Protocol):
    """A source of samples."""

    @property
    def option(self) -> str:
        """The name of the source in the ids of its samples, such as ``data.train`` in ``data.train:17``."""

    @property
    def name(self) -> str:
        """The option and its value, for messages and the audit."""

    def content(self, cache: Path) -> list[str]:
        """Return digests that change with the content of the source."""

    def items(self, kind: SampleKind) -> SourceItems:
        """Return the content of the source.

        Raises:
            ConfigError: if the records cannot be read, or do not give samples of ``kind``.
        """


@dataclass(frozen=True, kw_only=True)
class RecordSource(ABC):
    """A source of records: ``data.train``, ``data.eval`` or an entry of ``data.sources``."""

    option: str
    options: RecordOptions = field(default_factory=RecordOptions)
    max_samples: int | None = None
    """Number of records that are read, from the first one. None means all."""
    streaming: bool = False
    """Whether the source is streamed, because it may be too large to be read as a whole."""
    convert: Callable[[Record], Record] | None = None
    """Function that is applied to every record before its fields are read."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def records(self) -> Records: ...

    @abstractmethod
    def files(self, cache: Path) -> list[str]:
        """Return strings that change with the files or the data set that holds the records."""

    def content(self, cache: Path) -> list[str]:
        own = [] if self.convert is None else own_options(self.convert)
        # Data without bad records gives the same samples with every value of on_bad_record. ``build_store``
        # counts the value for the tokens. train_on_prompt is an option of the encoder, too, which counts it.
        options = asdict(replace(self.options, on_bad_record="stop"))
        del options["train_on_prompt"]
        return [digest([options, self.max_samples, *own]), *self.files(cache)]

    @abstractmethod
    def version(self) -> list[str]:
        """Return parts of the cache key of a stream that ``files`` omits, because they differ between copies.

        They are the path and the time of every file, or the path and a digest of a local data set. A data set
        of the hub has none: ``files`` has its commit.
        """

    def commit(self) -> str | None:
        """Return the commit of a repository that the source is read from now. None means that it has none."""
        return None

    def at(self, commit: str | None) -> "RecordSource":  # noqa: ARG002
        """Return the same source, read from ``commit``, which ``commit()`` has returned."""
        return self

    def items(self, kind: SampleKind) -> SourceItems:
        read = self.records()
        every = read if self.convert is None else map(partial(_converted, self.convert), read)
        first, again, records = tee(islice(every, self.max_samples), 3)
        check_columns(_readable(islice(first, _PROBED)), self.options)
        options = replace(self.options, format=self._format(islice(again, _PROBED), kind))
        assert options.format != "auto"
        found = KINDS[options.format]
        split = found == "preference" and kind == "unpaired"
        if not split and found != ("preference" if kind == "ranked" else kind):
            remedy = "give every record a 'label', " if kind == "unpaired" else ""
            if (found, kind) == ("unpaired", "chat"):
                remedy = (
                    "a data.format without labels (prompt_completion, messages, sharegpt or alpaca) to train "
                    "on answers whatever their label is, "
                )
            raise ConfigError(
                f"{self.name}: its format is {options.format}, and stage={STAGES[kind]} does not train on "
                "that.\n"
                f"Use stage={STAGES[found]}, {remedy}or name another format in data.format; "
                f"a loss of your own trains on it with stage.kind={found}."
            )
        options = replace(options, ranked=kind == "ranked" and "margin" not in options.ignore_fields)
        return SourceItems(options.format, records, options, read.reading.fraction, split)

    def _format(self, records: Iterator[Item], kind: SampleKind) -> Format:
        """Return the format of the first record or, if bad ones are skipped, of the first that has one.

        Raises:
            ConfigError: if ``records`` is empty, or with the fault of the first record if none has a format.
        """
        faults = []
        for record, origin in records:
            try:
                if isinstance(record, Unreadable):
                    raise record.error
                if self.options.format != "auto":
                    return self.options.format
                return detect(renamed(record, self.options), kind, origin)
            except ConfigError as error:
                faults.append(error.with_traceback(None))  # whose frames would keep all further records
                if self.options.on_bad_record == "stop":
                    break
        if not faults:
            raise ConfigError(f"{self.name}: holds no record. Give a data set with at least one.")
        raise faults[0]


@dataclass(frozen=True, kw_only=True)
class FileSource(RecordSource):
    """Files: a path, or a pattern such as ``data/*.jsonl``."""

    path: str

    @property
    def name(self) -> str:
        return f"{self.option}={self.path}{_only_first(self)}"

    def records(self) -> Records:
        return read_records(self.path)

    def files(self, cache: Path) -> list[str]:
        path = Path(expand_home(self.option, self.path))
        found = matching_files(self.path)
        warn_of_unread_files(self.path)
        # How a file of a pattern is read depends on its ending.
        endings = ["" if file == path else "".join(file.suffixes[-2:]) for file in found]
        names = [str(file.relative_to(path)) for file in found] if path.is_dir() else endings
        if self.streaming:
            contents = [str(file.stat().st_size) for file in found]
        else:
            contents = self._digests(found, cache)
        return ["".join(path.suffixes[-2:]), *map(" ".join, zip(names, contents, strict=True))]

    def _digests(self, files: list[Path], cache: Path) -> list[str]:
        try:
            return [file_digest(file.resolve(), cache) for file in files]
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read ({error.strerror}). Check the file.") from error

    def version(self) -> list[str]:
        return [f"{file.absolute()} {file.stat().st_mtime_ns}" for file in matching_files(self.path)]


@dataclass(frozen=True, kw_only=True)
class HubSource(RecordSource):
    """A data set of the Hugging Face hub, or a folder that the ``datasets`` library can load."""

    dataset: HubDataset

    @property
    def name(self) -> str:
        return f"{self.option}={self.dataset.name}{_only_first(self)}"

    def records(self) -> Records:
        return self.dataset.records(streaming=self.streaming)

    def files(self, cache: Path) -> list[str]:  # noqa: ARG002
        if not self.streaming:
            return [self.dataset.fingerprint()]
        folder = self.dataset.local
        if folder is None:
            return [str(self.dataset), self.dataset.version()]
        sizes = [f"{file.relative_to(folder)} {file.stat().st_size}" for file in data_files(folder)]
        return [str(replace(self.dataset, repo="")), *sizes]

    def commit(self) -> str | None:
        return self.dataset.commit()

    def at(self, commit: str | None) -> RecordSource:
        return self if commit is None else replace(self, dataset=replace(self.dataset, revision=commit))

    def version(self) -> list[str]:
        folder = self.dataset.local
        return [] if folder is None else [str(folder.absolute()), self.dataset.version()]


def own_options(function: Callable[..., object]) -> list[str]:
    """Return the fields, as JSON, that the dataclass of a bound method adds to those of this package.

    The list is empty if ``function`` is not a bound method of a dataclass.
    """
    owner: object = getattr(function, "__self__", None)
    kind = type(owner)
    if not is_dataclass(kind):
        return []
    package = __name__.partition(".")[0]
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == package]
    ours = {known.name for base in bases if is_dataclass(base) for known in fields(base)}
    own = {known.name: getattr(owner, known.name) for known in fields(kind) if known.name not in ours}
    return [json.dumps(own, sort_keys=True, default=_as_json)]


def _as_json(value: object) -> object:
    """Return a substitute for ``value``, which JSON cannot encode: the items of a set, else the class name.

    Unlike ``repr``, it is the same in every process.
    """
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else type(value).__qualname__


def _only_first(source: RecordSource) -> str:
    return f", its first {source.max_samples:,} records" if source.streaming and source.max_samples else ""


def _converted(convert: Callable[[Record], Record], item: Item) -> Item:
    record, origin = item
    if isinstance(record, Unreadable):
        return item
    try:
        return convert(record), origin
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        fields = f"The fields are {', '.join(record)}; correct the record, or convert."
        what = f"{origin}: convert raised {type(error).__name__}: {error}. {fields}"
        return Unreadable(RecordError(what)), origin


def _readable(records: Iterator[Item]) -> Iterator[tuple[Record, str]]:
    for record, origin in records:
        if not isinstance(record, Unreadable):
            yield record, origin


@dataclass(frozen=True)
class StdlibSource:
    """One split of the embedded data, the Python standard library."""

    split: SplitName
    max_samples: int | None = None
    option: str = "stdlib"

    @property
    def name(self) -> str:
        return f"stdlib ({self.split})"

    def content(self, cache: Path) -> list[str]:  # noqa: ARG002
        root = Path(sysconfig.get_path("stdlib"))
        listing = []
        for folder, names, files in os.walk(root):
            names[:] = sorted(set(names) - {"site-packages", "dist-packages", "__pycache__"})
            sources = sorted(name for name in files if name.endswith(".py"))
            listing += [f"{folder}/{name} {os.path.getsize(f'{folder}/{name}')}" for name in sources]
        limit = [] if self.max_samples is None else [str(self.max_samples)]
        return [self.split, sys.version, digest(listing), *limit]

    def items(self, kind: SampleKind) -> SourceItems:
        return SourceItems("embedded", islice(stdlib_records(kind, self.split), self.max_samples))
