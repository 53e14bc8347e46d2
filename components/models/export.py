"""Writing a folder that ``AutoModelForCausalLM.from_pretrained`` reads."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from components.models.spec import ModelSpec

SHARD_BYTES = 4 * 2**30


def export_folder(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    path: Path,
    dtype: torch.dtype,
    *,
    write: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors files of at most ``shard_bytes`` (or one tensor).

    ``tensors`` (Hugging Face name, whole tensor in ``dtype``; tied ones once) is consumed on every rank,
    because making them is collective; only the rank that has ``write`` keeps and stores them.
    """
    if not write:
        for _ in tensors:
            pass
        return
    path.mkdir(parents=True, exist_ok=True)
    save_config(spec.config(), path, dtype)
    # How many shards there are, which is part of their names, is known only at the end.
    shards = []
    for number, shard in enumerate(sharded(tensors, shard_bytes)):
        file = path / f".shard-{number}"
        save_file(shard, file, metadata={"format": "pt"})
        shards.append((file, {name: tensor.nbytes for name, tensor in shard.items()}))
    name_shards(path, shards)


def save_config(config: PreTrainedConfig, path: Path, dtype: torch.dtype) -> None:
    config.use_cache, config.dtype = True, dtype
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(path)


def sharded(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def name_shards(path: Path, shards: list[tuple[Path, dict[str, int]]]) -> None:
    if len(shards) == 1:
        shards[0][0].replace(path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, sizes) in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file.replace(path / name)
        weight_map |= dict.fromkeys(sizes, name)
    total = sum(sum(sizes.values()) for _, sizes in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
