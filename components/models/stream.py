"""Safetensors files that are written tensor by tensor, byte for byte as ``safetensors`` writes them."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from components.models.export import SHARD_BYTES, Sizes, finish_folder
from components.models.spec import ModelSpec
from components.models.weights import WeightSource

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
ALIGNMENT = 8
"""Of where the first tensor begins."""


def stream_folder(
    spec: ModelSpec,
    shapes: Mapping[str, torch.Size],
    source: WeightSource,
    path: Path,
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """As ``export_folder`` in one process, but that it holds one of the tensors ``shapes`` at a time."""
    path.mkdir(parents=True, exist_ok=True)
    written = []
    for number, names in enumerate(split(shapes, dtype, shard_bytes)):
        file = path / f".shard-0-{number}"
        written.append((file, stream_file(file, {name: shapes[name] for name in names}, source, dtype)))
    finish_folder(spec, path, dtype, written)


def split(shapes: Mapping[str, torch.Size], dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    """Names of the tensors of every file, none of which is larger than ``limit`` (or holds one tensor)."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if names and size + size_of(shape, dtype) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += size_of(shape, dtype)
    if names:
        yield names


def stream_file(
    path: Path, shapes: Mapping[str, torch.Size], source: WeightSource, dtype: torch.dtype
) -> Sizes:
    """Writes the tensors in the order of their names; their sizes in bytes."""
    sizes = {name: size_of(shape, dtype) for name, shape in shapes.items()}
    names = sorted(sizes)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + sizes[name]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shapes[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = source(name).to(dtype).contiguous()
            assert tensor.shape == shapes[name], name
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
    return sizes


def size_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
