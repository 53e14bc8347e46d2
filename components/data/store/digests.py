"""Hashes of values and of files, from which the names in the cache are made."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from components.data.store.checked_files import DamagedFile, read_checked_json, write_checked_json

_MEMO_BYTES = 2**26  # digests of larger files are cached by size and time


def digest(value: object) -> str:
    """Return a hash of a value that JSON can hold, as 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def file_digest(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits.

    That of a file of at least ``_MEMO_BYTES`` is cached in the folder ``cache``, by path, size, modification
    time and inode.
    """
    stat = path.stat()
    memo = cache / "digests" / digest([str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    with suppress(DamagedFile):
        return str(read_checked_json(memo)["sha256"])
    with path.open("rb") as file:
        value = hashlib.file_digest(file, "sha256").hexdigest()
    if stat.st_size >= _MEMO_BYTES:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(memo, {"sha256": value})
    return value
