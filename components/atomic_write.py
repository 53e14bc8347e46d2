"""Atomic replacement of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from components.rank_info import RankInfo


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` so that a kill at any time leaves either the old or the new content on disk.

    Several processes may write the same path at once.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``path`` when the context exits without an error."""
    # Nodes that share a file system can have equal process ids, and two runs have equal ranks.
    partial = path.with_name(f".{path.name}.{RankInfo.read().rank}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Force the directory entries of the folder ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
