"""Files that are replaced as a whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from components.rank_info import RankInfo


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path``, such that a kill at any instant leaves the old content or the new one, on disk.

    Several processes may write the same path at once.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` when the context is left without an error."""
    # Process numbers may be the same on two nodes that share a file system, and ranks in two runs.
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
    """Force the names in the folder ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
