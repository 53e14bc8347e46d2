"""Checksums of files: XXH3, 64 bits."""

import hashlib
from pathlib import Path

import xxhash

CHUNK = 2**22
"""Size in bytes of the pieces in which files are hashed: small enough that a piece that has just been hashed
is still in the CPU cache when it is written."""


def checksum(path: Path) -> str:
    """Return the checksum of the content of a file, as 16 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
