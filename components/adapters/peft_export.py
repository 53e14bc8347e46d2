"""Writing an adapter folder in peft's format."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.adapters.lora_config import INITIAL, A, B, LoRA, initial_name
from components.adapters.peft_folder import CONFIG, PREFIX, TENSORS
from components.adapters.target_modules import leaf_names, linear_names, matches
from components.atomic_write import write_atomic
from components.checkpoint.dcp import gather_results
from components.models import ModelSpec, nf4
from components.models.export.hf_file_names import file_names, module_name
from components.models.export.hf_folder import SHARD_BYTES, rank, write_safetensors, write_shards
from components.models.scalar_head import has_scalar_head

if TYPE_CHECKING:
    from peft import LoraConfig


def export_adapter(adapter: LoRA, spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write adapter_config.json, adapter_model.safetensors and the quantisation of the base model, if any.

    Every rank calls this function with the tensors that it writes: their names in memory, and full
    (unsharded) tensors. Each tensor is written by one rank only. From tensors in fp32, training continues
    bitwise. ``path`` is on a filesystem that all ranks share. The folder is complete when the function
    returns on any rank. Iterating over ``tensors`` may involve collectives. An error on one rank is raised on
    all ranks. With pissa, A and B in the file are ``[A; A0]`` and ``[B, -B0]``, as in peft's conversion.
    """
    rename = file_names(spec.meta_model.config.model_type)
    renamed = ((PREFIX + rename(name), tensor) for name, tensor in tensors)
    written = gather_results(lambda: write_shards(path, renamed, SHARD_BYTES))
    files = [file for shards in written for file, _ in shards]
    gather_results(lambda: merge_shards(adapter, spec, files, path) if rank() == 0 else None)


def merge_shards(adapter: LoRA, spec: ModelSpec, files: list[Path], path: Path) -> None:
    """Replace ``files`` by the single file that peft reads, and write the configurations next to it.

    A kill before the end leaves the weights of an earlier export.
    """
    model, partial = spec.meta_model, path / ".shard-merged"
    merged: dict[str, Tensor] = {}
    for file in files:
        merged |= load_file(file)
    write_safetensors(with_initial(merged) if adapter.is_pissa else merged, partial)
    # As peft's save_pretrained, which writes the file in place.
    settings = peft_config(adapter.exported, model, spec).to_dict()
    write_atomic(path / CONFIG, json.dumps(settings, indent=2, sort_keys=True, default=sorted))
    if adapter.quantize is not None:
        quantized = adapter.quantized_weights(model)
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        nf4.write_quantization_config(path, [n for n in linear if f"{n}.weight" not in quantized])
    shutil.copymode(path / CONFIG, partial)  # safetensors lets only the owner read its files
    partial.replace(path / TENSORS)
    for file in path.glob(".shard-*"):  # also those of an export that was killed
        file.unlink()


def with_initial(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a pissa adapter's tensors with ``[A; A0]`` for each A and ``[B, -B0]`` for each B."""
    joined = {name: tensor for name, tensor in tensors.items() if f".{INITIAL}." not in name}
    for name in joined:
        if name.endswith(A):
            joined[name] = torch.cat([tensors[name], tensors[initial_name(name)]])
        elif name.endswith(B):
            joined[name] = torch.cat([tensors[name], -tensors[initial_name(name)]], 1)
    return joined


def base_name(spec: ModelSpec) -> str | None:
    """Return the folder or hub id of the base model, for peft. None means that its weights are in neither."""
    if not spec.is_pretrained or spec.path is None:
        return None
    folder = Path(spec.path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else spec.path


def peft_config(adapter: LoRA, model: PreTrainedModel, spec: ModelSpec | None = None) -> "LoraConfig":
    """Return peft's configuration of ``adapter`` for ``model``.

    ``spec`` describes the base model of an export. None means a configuration for training.
    """
    from peft import LoraConfig  # slow to import

    alpha = adapter.alpha
    return LoraConfig(
        r=adapter.r,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=adapter.dropout,
        target_modules=[
            module_name(name, model.config.model_type)
            for name in shortest_suffixes(adapter.targets(model), linear_names(model))
        ],
        modules_to_save=adapter.saved(model) or None,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        init_lora_weights=True if adapter.init_lora_weights != "gaussian" else "gaussian",
        task_type="SEQ_CLS" if has_scalar_head(model) else "CAUSAL_LM",
        base_model_name_or_path=None if spec is None else base_name(spec),
        revision=None if spec is None else spec.revision,
        inference_mode=spec is not None,
    )


def shortest_suffixes(targets: list[str], linears: list[str]) -> list[str]:
    """Return the last parts of the names ``targets`` if they match the same modules, else the full names."""
    words = leaf_names(targets)
    meant = [name for name in linears if any(matches(name, word) for word in words)]
    return words if meant == targets else targets
