"""Writing a folder that ``from_pretrained`` of transformers reads."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from components.checkpoint.dcp import InCollectiveError, gather_results
from components.models.config import ModelSpec
from components.models.export.hf_file_names import file_names

SHARD_BYTES = 4 * 2**30

Sizes = dict[str, int]
"""Size of each tensor in a file, in bytes, by the tensor's name."""


def export_folder(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
    dtype: torch.dtype,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model folder: config.json, and safetensors files of at most ``shard_bytes`` or of one tensor.

    Every rank calls this function with the tensors that it writes: their Hugging Face names, and full
    (unsharded) tensors in the ``stored_dtype`` of ``dtype``. Each tensor is written by one rank only, and a
    tied tensor under one name only. ``path`` is on a filesystem that all ranks share. The folder is complete
    when the function returns on any rank. Every rank iterates over all of its ``tensors``, which may involve
    collectives. An error on one rank is raised on all ranks.
    """
    rename = file_names(spec.config().model_type)
    renamed = ((rename(name), tensor) for name, tensor in tensors)
    written = gather_results(lambda: write_shards(path, renamed, shard_bytes))

    def complete() -> None:
        if rank() == 0:
            write_configs(spec, path, dtype)
            name_shards(path, [shard for shards in written for shard in shards])

    gather_results(complete)


def write_configs(spec: ModelSpec, path: Path, dtype: torch.dtype) -> None:
    """Write config.json and, if the folder of the initial model has one, a copy of generation_config.json."""
    config = spec.config()
    config.use_cache, config.dtype = True, dtype
    if not spec.trust_remote_code:
        vars(config).pop("auto_map", None)  # it names files of code, which are not copied
    by_config = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if spec.scalar_head else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in by_config:
        config.architectures = [by_config[type(config)].__name__]
    config.save_pretrained(path)
    if spec.reads_path and (source := spec.folder() / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(source, path / GENERATION_CONFIG_NAME)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def write_shards(path: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> list[tuple[Path, Sizes]]:
    """Write safetensors files of at most ``limit`` bytes or of one tensor, and return them with their sizes.

    Their names are temporary, because the final names contain the number of files of all ranks.
    """
    shards, remaining = [], gathered(tensors)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(sharded(remaining, limit)):
            file = path / f".shard-{rank()}-{number}"
            write_safetensors(shard, file)
            shards.append((file, {name: tensor.nbytes for name, tensor in shard.items()}))
    except Exception:
        for _ in remaining:  # the iteration may involve collectives, in which the other ranks wait
            pass
        raise
    return shards


def gathered(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensors``, whose iteration may involve collectives; raise InCollectiveError if it fails."""
    try:
        yield from tensors
    except Exception as error:
        raise InCollectiveError(error) from error


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file of ``tensors``.

    Raises:
        OSError: if the operating system reports an error. safetensors raises SafetensorError instead.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def sharded(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def name_shards(path: Path, shards: list[tuple[Path, Sizes]]) -> None:
    """Rename the files to the names that transformers expects, and write the index if there are several.

    Weights of an earlier export are removed, which readers could prefer to those of this one.
    """
    stem, suffix = SAFE_WEIGHTS_NAME.split(".")
    earlier = {*path.glob(f"{stem}*.{suffix}"), path / SAFE_WEIGHTS_INDEX_NAME, *path.glob(".shard-*")}
    for old in earlier - {file for file, _ in shards}:
        old.unlink(missing_ok=True)
    for file, _ in shards:  # safetensors lets only the owner read its files
        shutil.copymode(path / CONFIG_NAME, file)
    if len(shards) == 1:
        shards[0][0].replace(path / SAFE_WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, (file, sizes) in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        assert not weight_map.keys() & sizes.keys(), "a tensor was written twice"
        file.replace(path / name)
        weight_map |= dict.fromkeys(sizes, name)
    total = sum(sum(sizes.values()) for _, sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
