"""Writing the folder that peft reads."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.adapters.peft_folder import CONFIG, PREFIX, TENSORS
from components.adapters.targets import leaf_names, linear_names, matches
from components.models import ModelSpec, named_shapes, stream_folder
from components.models.export.export import SHARD_BYTES, gather_objects, rank, write_shards
from components.models.export.hf_file_names import file_names, module_name
from components.models.generate import amend

if TYPE_CHECKING:
    from peft import LoraConfig

    from components.adapters.lora_config import LoRA

BASE, REVISION = "base_model_name_or_path", "revision"
"""Where adapter_config.json says which model the adapter is for."""


def export_adapter(
    adapter: "LoRA", spec: ModelSpec, tensors: Iterable[tuple[str, Tensor]], path: Path
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors.

    Every rank calls it with the tensors that it writes (our name, whole tensor; fp32 for a copy that training
    continues from bitwise); over all ranks each comes once. ``path`` is on a disk that all ranks share. The
    folder is complete when a rank returns. Making ``tensors`` may be collective.
    """
    path.mkdir(parents=True, exist_ok=True)
    model = spec.build(spec.config())
    rename = file_names(model.config.model_type)
    renamed = ((PREFIX + rename(name), tensor) for name, tensor in tensors)
    written = gather_objects(write_shards(path, renamed, SHARD_BYTES))
    if rank() == 0:
        # peft looks for one file.
        files = [file for shards in written for file, _ in shards]
        merged: dict[str, Tensor] = {}
        for file in files:
            merged |= load_file(file)
        save_file(merged, path / TENSORS, metadata={"format": "pt"})
        for file in files:
            file.unlink()
        peft_config(adapter, model, spec).save_pretrained(str(path))
    if dist.is_initialized():
        dist.barrier()


def finish_export(
    spec: ModelSpec, export: Path, base: Path, seed: int, dtype: torch.dtype
) -> PreTrainedTokenizerBase:
    """Adds the tokenizer, and returns it. In one process, when every rank has exported.

    Where the model's weights are random, or a checkpoint's, it writes these to the folder ``base`` in
    ``dtype`` and names them in adapter_config.json.
    """
    tokenizer = spec.load_tokenizer()
    tokenizer.save_pretrained(export)
    if spec.is_pretrained:
        return tokenizer
    stream_folder(spec, named_shapes(spec.build(spec.config())), spec.weights(seed), base, dtype)
    spec.add_tokenizer(base)
    name_base(export, base)
    return tokenizer


def name_base(export: Path, base: Path) -> None:
    """Says in the adapter's folder ``export`` that its model is in the folder ``base``."""
    amend(export / CONFIG, {BASE: str(base.absolute())})


def base_name(spec: ModelSpec) -> str | None:
    """What peft loads the model from; None: the weights are in no folder that it reads."""
    if not spec.is_pretrained or spec.path is None:
        return None
    folder = Path(spec.path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else spec.path


def peft_config(adapter: "LoRA", model: PreTrainedModel, spec: ModelSpec | None = None) -> "LoraConfig":
    """peft's own description, which adapts the same modules of ``model``."""
    from peft import LoraConfig  # here, because it takes seconds

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
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if spec is None else base_name(spec),
        revision=None if spec is None else spec.revision,
        inference_mode=spec is not None,
    )


def shortest_suffixes(targets: list[str], linears: list[str]) -> list[str]:
    """Last parts of names where these mean the same modules, else whole names."""
    words = leaf_names(targets)
    meant = [name for name in linears if any(matches(name, word) for word in words)]
    return words if meant == targets else targets
