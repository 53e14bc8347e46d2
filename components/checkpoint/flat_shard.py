"""A rank's range of a flattened tensor, which is saved as it is in memory, without an all-gather."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class FlatChunk:
    """A rectangular part of a tensor whose elements are contiguous in the rank's flat tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Offset in the flat tensor."""


class FlatShard(Tensor):
    """A one-dimensional tensor that contains the ``chunks`` of a tensor of shape ``whole``.

    ``torch.distributed.checkpoint`` calls its methods to save the chunks and to read them.
    """

    whole: torch.Size
    chunks: Sequence[FlatChunk]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(flat: Tensor, whole: torch.Size, boxes: Sequence[FlatChunk]) -> "FlatShard":
        """Return a shard of a tensor of shape ``whole``, with the elements of the one-dimensional ``flat``.

        It shares memory with ``flat``. ``boxes`` are the parts of the tensor that ``flat`` contains.
        """
        assert flat.dim() == 1, "a flat tensor"
        made = flat.detach().as_subclass(FlatShard)
        made.whole, made.chunks = whole, boxes
        return made

    def like(self, flat: Tensor) -> "FlatShard":
        """Return a shard of the same positions with the values of ``flat``."""
        return FlatShard.of(flat, self.whole, self.chunks)

    def size(self) -> torch.Size:  # type: ignore[override]
        """Return the shape of the whole tensor, which the planner compares with the stored shape."""
        return self.whole

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes)) for box in self.chunks]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        (box,) = [box for box in self.chunks if torch.Size(box.offset) == index.offset]
        part = self.as_subclass(Tensor)[box.start : box.start + math.prod(box.sizes)]
        return part.view(box.sizes)


def flat_chunks(
    begin: int, end: int, columns: int, *, origin: Sequence[int], start: int
) -> Iterator[FlatChunk]:
    """Yield elements ``begin:end`` of a flattened matrix as the end of a row, full rows and the start of one.

    Args:
        origin: Offset of the matrix in the whole tensor. For a vector: one number, and ``columns`` is 1.
        start: Offset of element ``begin`` in the flat tensor.
    """
    while begin < end:
        row, column = divmod(begin, columns)
        full = (end - begin) // columns if column == 0 else 0
        sizes = (full, columns) if full else (1, min(columns - column, end - begin))
        place = zip(origin, (row, column), strict=False)
        yield FlatChunk(tuple(o + at for o, at in place), sizes[: len(origin)], start)
        begin, start = begin + math.prod(sizes), start + math.prod(sizes)
