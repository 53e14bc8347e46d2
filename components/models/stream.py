"""Safetensors files that are written tensor by tensor, byte for byte as ``safetensors`` writes them."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from components.models.disk import file_names
from components.models.experts import stored_dtype
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
    rename = file_names(spec.config().model_type)
    ours = {rename(name): name for name in shapes}
    written = []
    for number, names in enumerate(split({n: shapes[ours[n]] for n in ours}, dtype, shard_bytes)):
        file = path / f".shard-0-{number}"
        stored = {name: shapes[ours[name]] for name in names}
        written.append((file, stream_file(file, stored, lambda name: source(ours[name]), dtype)))
    finish_folder(spec, path, dtype, written)


def split(shapes: Mapping[str, torch.Size], dtype: torch.dtype, limit: int) -> Iterator[list[str]]:
    """Names of the tensors of every file, none of which is larger than ``limit`` (or holds one tensor)."""
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        needed = size_of(shape, stored_dtype(name, dtype))
        if names and size + needed > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += needed
    if names:
        yield names


def stream_file(
    path: Path, shapes: Mapping[str, torch.Size], source: Callable[[str], Tensor], dtype: torch.dtype
) -> Sizes:
    """Writes the tensors in the order of their dtypes and names; their sizes in bytes."""
    dtypes = {name: stored_dtype(name, dtype) for name in shapes}
    sizes = {name: size_of(shape, dtypes[name]) for name, shape in shapes.items()}
    names = sorted(sizes, key=lambda name: (-dtypes[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + sizes[name]
        header[name] = {
            "dtype": DTYPES[dtypes[name]],
            "shape": list(shapes[name]),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = source(name).to(dtypes[name]).contiguous()
            assert tensor.shape == shapes[name], name
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
    return sizes


def size_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
