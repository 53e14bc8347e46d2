"""The files of a checkpoint: size and checksum are computed during the write, so that no file is read back.

The checksum is XXH3 (64 bits), because CRC-32 takes as long as writing to a fast disk.
"""

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config
from typing_extensions import Buffer

from components.checksum import CHUNK, checksum


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one written file."""

    bytes: int
    xxh3: str


class MeasuredFile(io.BufferedWriter):
    """A new file that counts and hashes the bytes written to it, and is on disk after it has been closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), buffer_size=1 << 20)
        self.size, self.hash = 0, xxhash.xxh3_64()

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self.hash.update(part)
            super().write(part)
        self.size += len(view)
        return len(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()


class MeasuredFiles(FileSystem):
    """torch's file system interface, with a record of every written file."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.refusal: OSError | None = None
        """The OSError of a failed write, for which torch may raise a RuntimeError about file positions."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        try:
            with MeasuredFile(Path(path)) as file:
                yield file
        except (OSError, RuntimeError) as error:
            found = error if isinstance(error, OSError) else error.__context__
            self.refusal = found if isinstance(found, OSError) else None
            raise
        self.records[Path(path).name] = FileRecord(file.size, file.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class MeasuredWriter(FileSystemWriter):
    """torch's checkpoint writer, with ``MeasuredFiles`` as its file system."""

    def __init__(self, path: Path) -> None:
        # MeasuredFile syncs. No copy-ahead from a GPU: if all tensors are in host memory already, it would
        # synchronise with the first GPU, whichever is this rank's.
        super().__init__(path, sync_files=False, per_thread_copy_ahead=0)
        self.fs: MeasuredFiles = MeasuredFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data.

        Raises:
            OSError: if the disk fails. torch then reports it on all ranks.
        """
        # Each tensor is a zip archive with its own checksum, which would take as long as ours.
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            try:
                return super().write_data(plan, planner)
            except RuntimeError:
                if self.fs.refusal is not None:
                    raise self.fs.refusal from None
                raise


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by their size in bytes."""


class AliasPlanner(DefaultSavePlanner):
    """A planner that passes parts of CPU tensors to the writer without the copies that torch would make.

    torch clones a tensor that does not fill its storage. Here each part is a view whose storage is the part.
    """

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, Tensor) and data.is_cpu and data.is_contiguous():
            # A storage that ends where the part does; as integers, because numpy has no bfloat16.
            part = torch.from_numpy(data.detach().view(INTEGERS[data.itemsize]).numpy())
            return part.view(data.dtype)
        return data


def damage(folder: Path, files: dict[str, FileRecord], *, checksums: bool) -> str | None:
    """Describe the first of ``files`` that differs from its record. None means that all files are intact.

    Sizes are compared; with ``checksums`` every byte is read.
    """
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing; the files of all ranks must be in this folder"
        if (size := path.stat().st_size) != record.bytes:
            return f"{name} is damaged: it has {size} bytes, and {record.bytes} were written"
        if checksums and checksum(path) != record.xxh3:
            return f"{name} is damaged: its bytes are not those that were written"
    return None
