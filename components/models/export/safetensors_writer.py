"""Safetensors files written tensor by tensor, byte-identical to those of ``safetensors``."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.constants import SAFETENSORS_WEIGHTS_FILE_PATTERN
from torch import Tensor

from components.contracts.configs import WeightSource
from components.models.config import ModelSpec
from components.models.experts import stored_dtype
from components.models.export.hf_file_names import file_names
from components.models.export.hf_folder import SHARD_BYTES, name_shards, write_configs
from components.models.pretrained import CODES

ALIGNMENT = 8
"""Alignment of the first tensor's offset, in bytes."""


def stream_folder(
    spec: ModelSpec,
    shapes: Mapping[str, torch.Size],
    source: WeightSource,
    path: Path,
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the same folder as ``export_folder`` from one process, with one tensor in memory at a time."""
    path.mkdir(parents=True, exist_ok=True)
    rename = file_names(spec.config().model_type)
    ours = {rename(name): name for name in shapes}
    sizes = {name: size_of(shapes[ours[name]], stored_dtype(name, dtype)) for name in ours}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern=SAFETENSORS_WEIGHTS_FILE_PATTERN,
        max_shard_size=shard_bytes,
    )
    written = []
    for file, names in split.filename_to_tensors.items():
        unfinished, stored = path / f".{file}", {name: shapes[ours[name]] for name in names}
        stream_file(unfinished, stored, lambda name: source(ours[name]), dtype)
        written.append((unfinished, {name: sizes[name] for name in names}))
    write_configs(spec, path, dtype)
    name_shards(path, written)


def stored_tensors(
    spec: ModelSpec, shapes: Mapping[str, torch.Size], source: WeightSource, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of the files that ``stream_folder`` writes, all in memory."""
    rename = file_names(spec.config().model_type)
    names = {rename(name): name for name in shapes}
    return {stored: source(name).to(stored_dtype(stored, dtype)) for stored, name in names.items()}


def stream_file(
    path: Path, shapes: Mapping[str, torch.Size], source: Callable[[str], Tensor], dtype: torch.dtype
) -> None:
    """Write a safetensors file with one tensor in memory at a time.

    ``source`` returns the tensor of a name, with its shape in ``shapes``. A tensor is stored in ``dtype``, or
    in fp32 if it is a router bias. Tensors are ordered by dtype (widest first), then by name.
    """
    dtypes = {name: stored_dtype(name, dtype) for name in shapes}
    sizes = {name: size_of(shape, dtypes[name]) for name, shape in shapes.items()}
    names = sorted(sizes, key=lambda name: (-dtypes[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + sizes[name]
        header[name] = {
            "dtype": CODES[dtypes[name]],
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


def size_of(shape: torch.Size, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
