"""Files of the cache that contain a checksum (XXH3, 64 bits), so that damage is found when they are read."""

import json
import os
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from components.atomic_write import atomic_file, write_atomic
from components.checksum import CHUNK, checksum
from components.contracts.json_types import Json

_DIGEST = 8
"""Number of bytes of the checksum at the end of an array's file."""
_HEADERS = Lock()
"""Lock for parsing the headers of ``.npy`` files with Python's parser, which in Python 3.11 fails if two
threads use it at once (CPython 106905)."""


class DamagedFile(Exception):
    """The file is missing or incomplete, or its content has changed since it was written."""


class HashedFile:
    """A binary file that is open for writing, with the size and the checksum of its content so far."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open ``path`` and truncate it to its first ``size`` bytes, or keep all of them if it has fewer."""
        self.size, self._hash = 0, xxhash.xxh3_64()
        self._file: IO[bytes] = path.open("r+b" if size else "w+b")
        while kept := self._file.read(min(CHUNK, size - self.size)):
            self._count(kept)
        self._file.truncate(self.size)
        self._file.seek(self.size)

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._count(data)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _count(self, data: bytes) -> None:
        self.size += len(data)
        self._hash.update(data)


def save_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write a ``.npy`` file with a checksum at its end, as a whole or not at all."""
    with atomic_file(path) as file:
        np.save(file, values)
        file.flush()
        partial = Path(file.name)
        file.write(bytes.fromhex(checksum(partial)))


def load_array(path: Path) -> npt.NDArray[Any]:
    """Open an array that ``save_array`` wrote, memory-mapped.

    Raises:
        DamagedFile: if the file is missing, or its content is not what was written.
    """
    try:
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        body, written = content[:-_DIGEST], content[-_DIGEST:].tobytes()
        if xxhash.xxh3_64(body.data).digest() != written:
            raise DamagedFile(f"{path}: is damaged, its checksum differs")
        with _HEADERS:
            return np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError) as error:
        raise DamagedFile(f"{path}: is damaged ({error})") from error


def write_checked_json(path: Path, content: Json) -> None:
    """Replace ``path`` by a JSON file that contains ``content`` and its checksum."""
    write_atomic(path, json.dumps({"xxh3": _json_checksum(content), "content": content}))


def read_checked_json(path: Path) -> Json:
    """Return the content of a file that ``write_checked_json`` wrote.

    Raises:
        DamagedFile: if the file is missing, or its content is not what was written.
    """
    try:
        whole = json.loads(path.read_bytes())
        if whole["xxh3"] != _json_checksum(whole["content"]):
            raise DamagedFile(f"{path}: is damaged, its checksum differs")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path}: is damaged ({error!r})") from error
    content: Json = whole["content"]
    return content


def _json_checksum(content: object) -> str:
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()
