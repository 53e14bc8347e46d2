"""Read records from json, jsonl, csv, parquet and txt files, folders of them, and saved ``datasets``."""

import csv
import io
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn

import pyarrow
import pyarrow.parquet

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.records.options import RecordError
from components.home import expand_home
from components.json_text import parse_json

log = logging.getLogger(__name__)

Record = Json


@dataclass(frozen=True)
class Unreadable:
    """A placeholder for a record that could not be read."""

    error: RecordError


@dataclass(frozen=True)
class PairAnswer:
    """One of the two answers of a preference record, for a stage that trains on single answers."""

    record: Record
    chosen: bool


Item = tuple[Record | Unreadable, str]
"""A record with its origin, ``FILE:LINE`` or ``FILE:ROW``, counted from 1."""
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAX_NAME = 64  # a csv whose first row has longer cells begins with data, not with the names of fields


class Reading:
    """The progress of reading the files of a source."""

    def __init__(self, num_bytes: int) -> None:
        self._total, self._before, self._size = max(num_bytes, 1), 0, 0
        self._within: Callable[[], float] = float

    def begin(self, size: int) -> None:
        """Begin the next file, of ``size`` bytes."""
        self._before += self._size
        self._size, self._within = size, float

    def open(self, path: Path) -> IO[str]:
        """Open a text file, compressed or not; the progress follows the position in it."""
        file = path.open("rb")
        self._within = lambda: 1.0 if file.closed else file.tell() / max(self._size, 1)
        codec = _CODECS.get(path.suffix.lower())
        content: Any = (
            file if codec is None else pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec)
        )
        # Some editors begin a file with a byte order mark. ``_not_utf8`` finds the bytes that are escaped.
        return io.TextIOWrapper(content, encoding="utf-8-sig", errors="surrogateescape", newline="")

    def at_row(self, row: int, num_rows: int) -> None:
        """Set the progress in the current file to ``row`` of ``num_rows`` rows."""
        self._within = lambda: row / max(num_rows, 1)

    def fraction(self) -> float:
        return (self._before + self._size * self._within()) / self._total


class Records(Iterator[Item]):
    """An iterator over the records of a source, with its progress in ``reading``."""

    def __init__(self, records: Iterator[Item], reading: Reading) -> None:
        self._records, self.reading = records, reading

    def __next__(self) -> Item:
        return next(self._records)


def read_records(path: str) -> Records:
    """Return the records of a file, of a folder, or of all files that a pattern (``data/*.jsonl``) matches.

    jsonl, csv, txt (one document per line) and parquet are streamed.

    Raises:
        ConfigError: at once if the path is missing, or is or holds a pipe, a device or a socket; while
            records are read if a file is unreadable, malformed or of an unknown kind, or if all are empty.
    """
    sources = _matches(path)
    size = sum(file.stat().st_size for file in matching_files(path))
    reading = Reading(size)
    each = (_read_path(source, reading) for source in sources)
    if len(sources) > 1:
        each = (_if_empty(_read_path(source, reading), partial(_log_empty, source)) for source in sources)
    return Records(_if_empty(chain.from_iterable(each), partial(_refuse_empty, path)), reading)


def matching_files(path: str) -> list[Path]:
    """Return all files of ``path``, a file, a folder or a pattern, even those that no reader can read.

    Raises:
        ConfigError: if nothing matches, or if there is a pipe, a device or a socket.
    """
    return [file for source in _matches(path) for file in data_files(source)]


def _matches(path: str) -> list[Path]:
    if not path:
        raise ConfigError("data.train, data.eval, prompts: a path is empty; give one, or leave the key out.")
    source = Path(expand_home("data.train, data.eval or prompts", path))
    if os.path.exists(source):  # unlike Path.exists, no error if a parent may not be entered
        return [source]
    every = sorted(map(Path, glob(str(source), recursive=True))) if has_magic(path) else []
    folders = {place for place in every if place.is_dir()}  # "**" also matches what is below them
    found = [place for place in every if folders.isdisjoint(place.parents)]
    if not found:
        what = "matches no file" if has_magic(path) else "no such file or folder"
        near = get_close_matches(source.name, [other.name for other in source.parent.glob("*")], n=1)
        hint = f" Did you mean {source.with_name(near[0])}?" if near else ""
        is_local = _ending(source) in _READERS or os.path.exists(source.parent)
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not is_local:
            hint = f" For a data set of the Hugging Face hub, use hub:{path}.{hint}"
        raise ConfigError(f"{path}: {what}. Check the path in data.train, data.eval or prompts.{hint}")
    return found


def _read_path(source: Path, reading: Reading) -> Iterator[Item]:
    if _is_saved_dataset(source):
        reading.begin(sum(file.stat().st_size for file in data_files(source)))
        return _read_saved_dataset(source, reading)
    return _read_folder(source, reading) if source.is_dir() else _read_file(source, reading)


def _is_saved_dataset(source: Path) -> bool:
    return (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists()


def data_files(source: Path) -> list[Path]:
    """Return ``source`` in a list, or, if it is a folder, the sorted list of all files below it.

    Raises:
        ConfigError: if it is or contains a pipe, a device or a socket, from which reading may never end, or a
            folder that may not be read.
    """
    found = sorted(filter(os.path.exists, _below(source))) if source.is_dir() else [source]
    for path in found:
        if not path.is_file() and not _is_hidden(path.relative_to(source)):
            raise ConfigError(
                f"{path}: is a pipe, a device or a socket, not a file. Write the records to a file, or move "
                "it out of the folder of the data."
            )
    return [path for path in found if path.is_file()]


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, also in folders to which links lead, each of which is read once.

    Hidden folders are left out.

    Raises:
        ConfigError: if one of the folders may not be read.
    """
    entered = {os.path.realpath(folder)}

    def is_new(path: str) -> bool:
        target = os.path.realpath(path)
        known = target in entered
        entered.add(target)
        return not known

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}). Change its permissions, or move it out of "
            "the data."
        )

    for place, names, files in os.walk(folder, onerror=refuse, followlinks=True):
        paths = [os.path.join(place, name) for name in names if not name.startswith(".")]
        paths.sort(key=lambda path: (os.path.islink(path), path))
        names[:] = [os.path.basename(path) for path in paths if is_new(path)]
        yield from (Path(place, name) for name in files)


def _if_empty(records: Iterator[Item], fail: Callable[[], object]) -> Iterator[Item]:
    """Yield ``records``; call ``fail`` if there are none."""
    if (first := next(records, None)) is None:
        fail()
        return
    yield first
    yield from records


def _refuse_empty(path: str) -> NoReturn:
    raise ConfigError(f"{path}: holds no record. Give a file with at least one.")


@cache  # a folder may be read many times
def _log_empty(source: Path) -> None:
    log.warning("%s: holds no record", source)


def _read_folder(folder: Path, reading: Reading) -> Iterator[Item]:
    files = [path for path in _visible(folder) if _ending(path) in _READERS]
    if not files:
        raise ConfigError(
            f"{folder}: holds no {_EXTENSIONS} file, and is not a saved dataset. Check the folder."
        )
    for file in files:
        yield from _if_empty(_read_file(file, reading), partial(_log_empty, file))


def warn_of_unread_files(path: str) -> None:
    """Log how many files of the folders that ``path`` names are left out, because no reader can read them."""
    for folder in filter(Path.is_dir, _matches(path)):
        if not _is_saved_dataset(folder):
            unread = [file for file in _visible(folder) if _ending(file) not in _READERS]
            if others := [file for file in unread if not _is_readme_or_license(file)]:
                _log_unread(folder, len(others), others[0])


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in _below(folder) if not _is_hidden(path.relative_to(folder)))


def _is_readme_or_license(path: Path) -> bool:
    return path.name.upper().startswith(("README", "LICENSE"))


@cache  # a folder may be read many times
def _log_unread(folder: Path, number: int, first: Path) -> None:
    log.warning("%s: files left out that are not of %s: %d, such as %s", folder, _EXTENSIONS, number, first)


def _ending(path: Path) -> str:
    """Return the extension in lower case; for a compressed file, the one before ``.gz`` or ``.zst``."""
    compressed = path.suffix.lower() in _CODECS
    return Path(path.stem if compressed else path).suffix.lower()


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _read_file(path: Path, reading: Reading) -> Iterator[Item]:
    reader = _READERS.get(_ending(path))
    if reader is None:
        ending = path.suffix or "no extension"
        raise ConfigError(
            f"{path}: cannot read a file with {ending!r}. Use one of {_EXTENSIONS}, "
            "perhaps followed by .gz or .zst."
        )
    try:
        reading.begin(path.stat().st_size)
        yield from reader(path, reading)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 ({error.reason}). Convert it to UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}). Check the file.") from error


def _read_json(path: Path, reading: Reading) -> Iterator[Item]:
    """Read a list of objects, or else one object per line, which many ``.json`` files contain."""
    if _begins_with_a_line(path, reading):
        yield from _read_jsonl(path, reading)
        return
    with reading.open(path) as file:
        text = file.read()
    begins_an_object = text.lstrip().startswith("{")
    if not begins_an_object and (fault := _not_utf8(text, path, 1)):
        raise fault
    try:
        records = parse_json(text) if text.strip() else []
    except json.JSONDecodeError as error:
        is_one_line = "\n" not in text.strip()
        if begins_an_object and (is_one_line or error.msg == "Extra data" or "\n{" in text):
            yield from _read_jsonl(path, reading)
            return
        raise _malformed(f"{path}:{error.lineno}", error) from error
    if isinstance(records, dict) and "\n" not in text.strip():
        yield from _read_jsonl(path, reading)
        return
    if not isinstance(records, list):
        raise ConfigError(
            f"{path}: is a JSON {_kind(records)}, not a list of objects. Write one object per sample in [ ]."
        )
    del text  # as large as the records
    for row, record in enumerate(records, start=1):
        reading.at_row(row, len(records))
        yield _object(record, f"{path}:{row}"), f"{path}:{row}"


def _begins_with_a_line(path: Path, reading: Reading) -> bool:
    """Return whether the first line with text is a whole object and another one follows, as in jsonl."""
    with reading.open(path) as file:
        characters = iter(partial(file.read, 1), "")
        # A list may be a line as long as the file.
        if next(filter(str.strip, characters), "") != "{":
            return False
        try:
            parse_json("{" + file.readline())
        except json.JSONDecodeError:
            return False
        return any(map(str.strip, file))


def _read_jsonl(path: Path, reading: Reading) -> Iterator[Item]:
    with reading.open(path) as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path}:{number}"
            if fault := _not_utf8(line, path, number):
                yield Unreadable(fault), origin
            elif line.strip():
                try:
                    record = _object(parse_json(line.rstrip("\r\n")), origin)
                except json.JSONDecodeError as error:
                    record = Unreadable(_malformed(origin, error))
                yield record, origin


def _not_utf8(text: str, path: Path, line: int) -> RecordError | None:
    """Return an error that names the first byte of ``text``, which begins at ``line``, that is not UTF-8."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        line += text.count("\n", 0, error.start)
        byte = text[error.start].encode(errors="surrogateescape").hex()
        return RecordError(f"{path}:{line}: is not UTF-8 (byte 0x{byte}). Convert it to UTF-8.")
    return None


def _malformed(origin: str, error: json.JSONDecodeError) -> RecordError:
    return RecordError(f"{origin}: malformed JSON ({error.msg}, column {error.colno}). Correct this line.")


def _object(record: object, origin: str) -> Record | Unreadable:
    if isinstance(record, dict):
        return record
    what = f"{origin}: is a JSON {_kind(record)}, not an object. Write one {{...}} a record."
    return Unreadable(RecordError(what))


def _kind(value: object) -> str:
    return {dict: "object", list: "list", str: "string", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _read_csv(path: Path, reading: Reading) -> Iterator[Item]:
    """Read a csv file, whose first row names the fields; a record's origin is the line on which it begins.

    A malformed row ends the reading, since nothing shows where the next row begins.
    """
    csv.field_size_limit(2**31 - 1)  # a document may well be longer than the default of 128 KiB
    line = 1
    with reading.open(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            names = next(rows, [])
            if fault := _not_utf8(" ".join(names), path, line):
                raise fault
            if any(len(name) > _MAX_NAME or "\n" in name for name in names) or len(set(names)) < len(names):
                raise ConfigError(
                    f"{path}:1: is not a header with distinct field names. Begin the csv with one."
                )
            line = rows.line_num + 1
            for row in rows:
                begin, line = line, rows.line_num + 1
                origin = f"{path}:{begin}"
                if fault := _not_utf8(" ".join(row), path, begin):
                    yield Unreadable(fault), origin
                elif row and len(row) != len(names):
                    what = f"{origin}: has {len(row)} cells under {len(names)} names. Correct this row."
                    yield Unreadable(RecordError(what)), origin
                elif row:
                    yield dict(zip(names, row, strict=True)), origin
        except csv.Error as error:
            raise ConfigError(f"{path}:{line}: malformed csv ({error}). Correct this row.") from error


def _read_parquet(path: Path, reading: Reading) -> Iterator[Item]:
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = Counter(file.schema_arrow.names)
            if twice := [name for name, count in names.items() if count > 1]:
                raise ConfigError(f"{path}: has two columns {twice[0]!r}. Rename or remove one.")
            for batch in file.iter_batches(batch_size=1024):
                reading.at_row(row + batch.num_rows, file.metadata.num_rows)
                for record in batch.to_pylist():
                    row += 1
                    yield without_nulls(record), f"{path}:{row}"
    except (pyarrow.ArrowException, OverflowError) as error:  # Python has no dates after the year 9999
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"{path}: is not a readable parquet file ({reason}). Write it again.") from error


def _read_txt(path: Path, reading: Reading) -> Iterator[Item]:
    with reading.open(path) as file:
        for number, line in enumerate(file, start=1):
            if fault := _not_utf8(line, path, number):
                yield Unreadable(fault), f"{path}:{number}"
            elif line.strip():
                yield {"text": line.rstrip("\r\n")}, f"{path}:{number}"


def _read_saved_dataset(folder: Path, reading: Reading) -> Iterator[Item]:
    """Read the output of ``Dataset.save_to_disk``.

    Raises:
        ConfigError: if the folder cannot be read, or has several splits: the path must name one of them.
    """
    import datasets  # takes half a second, and only this reader needs it

    if (folder / "dataset_dict.json").exists():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ConfigError(f"{folder}: holds the splits {splits}. Give the folder of one, as {folder}/train.")
    if not (folder / "state.json").exists() and not any(folder.glob("*.arrow")):
        raise ConfigError(
            f"{folder}: has a dataset_info.json, but is not a saved dataset. For that of LLaMA-Factory, use "
            f"data=llamafactory data.dataset_info={folder} data.dataset=NAME, or name a file in the folder."
        )
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"{folder}: is not a readable saved dataset ({reason}). Save it again.") from error
    for row, record in enumerate(without_media(dataset), start=1):
        reading.at_row(row, len(dataset))
        yield without_nulls(record), f"{folder}:{row}"


def without_media(dataset: Any) -> Iterable[Record]:
    """Return the rows of a ``Dataset`` or ``IterableDataset``, with images, audio and video not decoded.

    Only text is trained on, and to decode the others needs further packages and time.
    """
    features = dataset.features
    stored = None if features is None else _stored(features)
    if stored == features:
        return dataset
    rows = dataset if hasattr(dataset, "decode") else dataset.to_iterable_dataset()
    return rows.decode(False).cast(stored)


def _stored(feature: Any) -> Any:
    """Return ``feature``, a feature of ``datasets`` or a mapping of features, with decoding switched off.

    Only its parts that are JSON are still decoded.
    """
    if isinstance(feature, dict):
        return type(feature)({name: _stored(inner) for name, inner in feature.items()})
    if hasattr(feature, "feature"):  # a list
        return replace(feature, feature=_stored(feature.feature))
    if hasattr(feature, "decode") and type(feature).__name__ != "Json":
        return replace(feature, decode=False)
    return feature


def without_nulls(record: Record) -> Record:
    """Return a row of an Arrow table without the nulls in the objects of its columns.

    Arrow gives all objects of a column the same fields. Without this, every tool call would have the
    arguments of all others, as nulls.
    """
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value[:1]):
        return [_without_nulls(inner) for inner in value]
    return value


_READERS: dict[str, Callable[[Path, Reading], Iterator[Item]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
_EXTENSIONS = ", ".join(_READERS)
