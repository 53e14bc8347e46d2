"""Read files of records: json, jsonl, csv, parquet, txt, folders of them, saved ``datasets``."""

import csv
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet

from components.contracts.errors import ConfigError
from components.json_text import parse_json

Record = dict[str, Any]
_MAX_NAME = 64  # a csv whose first row has longer cells begins with data, not with the names of fields


def read_records(path: str) -> Iterator[tuple[Record, str]]:
    """Return an iterator of (record, origin); origin is ``FILE:LINE`` or ``FILE:ROW``, counted from 1.

    jsonl, csv, txt (one document per line) and parquet are streamed.

    Raises:
        ConfigError: if the path is missing, unreadable, of an unknown kind, malformed or empty. A missing
            path is an error at once, everything else when records are read.
    """
    source = Path(path).expanduser()
    if not os.path.exists(source):  # unlike Path.exists, no error if a parent may not be entered
        raise ConfigError(f"{path}: no such file or folder. Check the path in data.train or data.eval.")
    if (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
        return _not_empty(_read_saved_dataset(source), source)
    if source.is_dir():
        return _not_empty(_read_folder(source), source)
    return _not_empty(_read_file(source), source)


def _not_empty(records: Iterator[tuple[Record, str]], source: Path) -> Iterator[tuple[Record, str]]:
    count = 0
    for count, item in enumerate(records, start=1):  # noqa: B007
        yield item
    if count == 0:
        raise ConfigError(f"{source}: holds no record. Give data.train a file with at least one.")


def _read_folder(folder: Path) -> Iterator[tuple[Record, str]]:
    found = (path for path in folder.rglob("*") if path.suffix.lower() in _READERS)
    files = sorted(path for path in found if not _is_hidden(path.relative_to(folder)))
    if not files:
        raise ConfigError(
            f"{folder}: holds no {_EXTENSIONS} file, and is no saved dataset. Check the folder."
        )
    for file in files:
        yield from _not_empty(_read_file(file), file)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _read_file(path: Path) -> Iterator[tuple[Record, str]]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        ending = path.suffix or "no extension"
        raise ConfigError(f"{path}: cannot read a file with {ending!r}. Use one of {_EXTENSIONS}.")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 ({error.reason}). Convert it to UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}). Check the file.") from error


def _open(path: Path) -> IO[str]:
    return path.open(encoding="utf-8-sig", newline="")  # some editors begin a file with a byte order mark


def _read_json(path: Path) -> Iterator[tuple[Record, str]]:
    """Read a list of objects. Many ``.json`` files are jsonl and are then read as such."""
    with _open(path) as file:
        text = file.read()
    try:
        records = parse_json(text) if text.strip() else []
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(path)
            return
        raise _malformed(f"{path}:{error.lineno}", error) from error
    if not isinstance(records, list):
        raise ConfigError(f"{path}: is a JSON {_kind(records)}, not a list of objects. Wrap it in [ ].")
    for row, record in enumerate(records, start=1):
        yield _object(record, f"{path}:{row}"), f"{path}:{row}"


def _read_jsonl(path: Path) -> Iterator[tuple[Record, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path}:{number}"
            if line.strip():
                try:
                    record = parse_json(line)
                except json.JSONDecodeError as error:
                    raise _malformed(origin, error) from error
                yield _object(record, origin), origin


def _malformed(origin: str, error: json.JSONDecodeError) -> ConfigError:
    return ConfigError(f"{origin}: malformed JSON ({error.msg}, column {error.colno}). Correct this line.")


def _object(record: object, origin: str) -> Record:
    if not isinstance(record, dict):
        raise ConfigError(f"{origin}: is a JSON {_kind(record)}, not an object. Write one {{...}} a record.")
    return record


def _kind(value: object) -> str:
    return {dict: "object", list: "list", str: "string", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _read_csv(path: Path) -> Iterator[tuple[Record, str]]:
    """Read a csv. The first row names the fields; a record's origin is the line it begins on."""
    csv.field_size_limit(2**31 - 1)  # a document may well be longer than the default of 128 KiB
    line = 1
    with _open(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            names = next(rows, [])
            if any(len(name) > _MAX_NAME or "\n" in name for name in names) or len(set(names)) < len(names):
                raise ConfigError(f"{path}:1: is no header of distinct field names. Begin the csv with one.")
            line = rows.line_num + 1
            for row in rows:
                origin, line = f"{path}:{line}", rows.line_num + 1
                if row and len(row) != len(names):
                    raise ConfigError(
                        f"{origin}: has {len(row)} cells under {len(names)} names. Correct this row."
                    )
                if row:
                    yield dict(zip(names, row, strict=True)), origin
        except csv.Error as error:
            raise ConfigError(f"{path}:{line}: malformed csv ({error}). Correct this row.") from error


def _read_parquet(path: Path) -> Iterator[tuple[Record, str]]:
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    row += 1
                    yield record, f"{path}:{row}"
    except pyarrow.ArrowException as error:
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"{path}: is no readable parquet file ({reason}). Write it again.") from error


def _read_txt(path: Path) -> Iterator[tuple[Record, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield {"text": line.rstrip("\r\n")}, f"{path}:{number}"


def _read_saved_dataset(folder: Path) -> Iterator[tuple[Record, str]]:
    """Read the output of ``Dataset.save_to_disk``. If it has several splits, the path must name one."""
    import datasets  # takes half a second, and only this reader needs it

    if (folder / "dataset_dict.json").exists():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise ConfigError(f"{folder}: holds the splits {splits}. Give the folder of one, as {folder}/train.")
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        reason, _, _ = str(error).partition("\n")
        raise ConfigError(f"{folder}: is no readable saved dataset ({reason}). Save it again.") from error
    for row, record in enumerate(dataset, start=1):
        yield record, f"{folder}:{row}"


_READERS: dict[str, Callable[[Path], Iterator[tuple[Record, str]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
_EXTENSIONS = ", ".join(_READERS)
