"""The keys of a configuration that a proof changes, so that the experiment is small."""

import json
from pathlib import Path

from components.adapters import LoRA
from components.atomic_write import write_atomic
from components.contracts.configs import AdapterConfig, DataConfig, ModelConfig
from components.contracts.json_types import Config, Json
from components.contracts.parallelism import ParallelismSpec
from components.data.data_sources import FileSource
from components.data.store.digests import digest
from components.data.store.indexed import indexed_prefix
from components.models import ModelSpec
from components.proof.small_layout import layout_sizes
from components.proof.small_model import Limits, small_config

SAMPLES = 256
"""Maximum number of records that are read from each source."""


def small_model(
    model: ModelConfig, node: Config, limits: Limits, layout: ParallelismSpec, cache: Path
) -> tuple[Json, Json, Json]:
    """Return the keys of a small model with random weights, and the old and new fields of its config.json.

    The new config.json is written to ``cache``. A model of the user's own class is not changed, and all three
    results are empty.
    """
    if not isinstance(model, ModelSpec):
        return {}, {}, {}
    old = model.config()
    fields = small_config(old, limits, layout_sizes(layout))
    text = json.dumps(fields, indent=1, sort_keys=True)
    folder = cache / "proof" / digest([text])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "config.json", text)
    keys: Json = {"path": str(folder), "architecture": None, "init": "random", "revision": None}
    keys |= {"tokenizer": None, "chat_template": None, "add_tokens": False}  # data is tokenised as composed
    if model.moe.depends_on_microbatches:
        keys["moe"] = {**node["moe"], "aux_loss": "sequence"}
    return keys, old.to_dict(), fields


def small_adapter(adapter: AdapterConfig | None, node: Config, model: ModelConfig) -> Json:
    """Return the keys of a new adapter in place of one whose training is continued (``path``).

    Its rank is at most the largest one for ``model``, the small one.
    """
    keys: Json = {}
    if adapter is not None and adapter.path is not None:
        settings = {key: getattr(adapter, key) for key in node if hasattr(adapter, key)}
        keys = settings | {"path": None, "init_lora_weights": "kaiming"}
    if isinstance(adapter, LoRA):
        keys["r"] = min(adapter.r, adapter.largest_rank(model.meta_model))
    return keys


def small_data(data: DataConfig, node: Config, limits: Limits) -> Json:
    """Return the keys that select short samples of the first records; all of an indexed data set is read."""
    new: Json = {"long_samples": "truncate"}
    if limits.max_length is not None:
        new["max_length"] = min(data.max_length, limits.max_length)
    sources = [source for source, _ in getattr(data, "train_sources", list)()]
    if not any(isinstance(s, FileSource) and indexed_prefix(s.path) for s in sources):
        new["max_samples"] = min(node.get("max_samples") or SAMPLES, SAMPLES)
    return {key: value for key, value in new.items() if key in node}
