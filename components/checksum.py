"""Checksums of files: XXH3, 64 bits."""

from pathlib import Path

import xxhash

CHUNK = 2**22
"""Bytes that are read at once."""


def checksum(path: Path) -> str:
    """Return the checksum of the content of a file, as 16 hexadecimal digits."""
    value = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            value.update(block)
    return value.hexdigest()
