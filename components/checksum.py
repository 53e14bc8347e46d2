"""Checksums of files: XXH3, 64 bits."""

import hashlib
from pathlib import Path

import xxhash

CHUNK = 2**22
"""Bytes that are hashed at once, small enough to be still in the cache when they are written."""


def checksum(path: Path) -> str:
    """Return the checksum of the content of a file, as 16 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
