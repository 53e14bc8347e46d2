"""An adapter folder in peft's format: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.adapters.target_modules import matches
from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.json_text import as_type, read_json
from components.models import nf4
from components.models.export.hf_file_names import Rename
from components.models.generate import amend
from components.models.pretrained import open_file
from components.run_exports import hint_for_run

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE, REVISION = "base_model_name_or_path", "revision"
"""Keys of adapter_config.json that name the base model of the adapter."""
PREFIX = "base_model.model."
"""Prefix of every tensor name in adapter_model.safetensors."""

HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "loftq_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}
"""Keys of adapter_config.json that are read, or that do not affect further training of the adapter."""

SELECTING = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""Keys of adapter_config.json that leave out modules with names in target_modules."""

WHOLE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which peft leaves the base model unchanged. With pissa, olora or loftq,
peft subtracts the product of the initial A and B from the base weights."""


@dataclass(frozen=True)
class Settings:
    """The keys of adapter_config.json that are read, with their types."""

    target_modules: list[str] | str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool | None = None
    use_dora: bool | None = None


def adapter_file(path: str, name: str) -> Path:
    file = Path(path).expanduser() / name
    if not file.is_file():
        raise ConfigError(
            f"adapter.path: {path} has no {name}; give the folder of a saved adapter."
            f"{hint_for_run(file.parent)}"
        )
    return file


def read_settings(path: str) -> Json:
    """Return the settings of the adapter at ``path``: the fields of ``LoRA`` on which its weights depend.

    Raises:
        ConfigError: if adapter_config.json is missing or malformed, or if the adapter is not a LoRA or is of
            a variant that the engines do not support.
    """
    config = read_json(adapter_file(path, CONFIG))
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"adapter.path: {path} is a {config.get('peft_type')} adapter; only LORA adapters are supported."
        )
    if config.get("init_lora_weights", True) not in WHOLE_BASE:
        raise ConfigError(
            f"adapter.path: {path}: with init_lora_weights={config['init_lora_weights']}, peft changes the "
            "weights of the base model, so the adapter does not fit the original model; save it as plain "
            "LoRA, with peft's path_initial_model_for_weight_conversion."
        )
    for key, value in config.items():
        if key not in HARMLESS and value not in (None, False, {}, [], "none"):
            raise ConfigError(
                f"adapter.path: {path}: {key}={value} is not supported by the engines; use an adapter that "
                "was trained without it, or merge it with peft's merge_and_unload and train the merged model."
            )
    try:
        as_type(Settings, config)
    except ValueError as error:
        raise ConfigError(f"adapter.path: {path}/{CONFIG}: {error}; correct it.") from error
    adapted, saved = stored_modules(path)
    named = tuple(config.get("modules_to_save") or ())
    if untrained := [name for name in saved if not name.endswith(named)]:
        raise ConfigError(
            f"adapter.path: {path} has the weights of {untrained[0]}, which is not in its modules_to_save, "
            "so peft did not train it (save_embedding_layers); save the adapter without it."
        )
    words = config["target_modules"]
    if isinstance(words, str) or any(config.get(key) not in (None, []) for key in SELECTING):
        words = adapted
    return {
        "r": config.get("r", 8),  # peft's own defaults
        "alpha": config.get("lora_alpha", 8),
        "target_modules": tuple(sorted(w for w in words if any(matches(name, w) for name in adapted))),
        "rslora": bool(config.get("use_rslora")),
        "modules_to_save": saved,
        "dora": bool(config.get("use_dora")),
    }


def stored_modules(path: str) -> tuple[list[str], tuple[str, ...]]:
    """Return the modules of which the folder has an adapter, and those of which it has all parameters.

    Names in adapter_config.json may match fewer modules, none, or more: in ``modules_to_save``, peft matches
    every end of a name.
    """
    with open_file(adapter_file(path, TENSORS), "adapter.path") as file:
        names = [name.removeprefix(PREFIX) for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118
    adapted = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    saved = {name.rpartition(".")[0] for name in names if ".lora_" not in name}
    if not adapted:
        raise ConfigError(
            f"adapter.path: {path}: {TENSORS} has no adapter of a module (a name that begins with {PREFIX}); "
            "give the folder of a saved adapter."
        )
    return sorted(adapted), tuple(sorted(saved))


def adapter_overrides(path: Path) -> dict[str, str]:
    """Return the keys that select the adapter at ``path`` and, if it names one, its base model."""
    settings = read_json(path / CONFIG)
    model = {"model.path": settings.get(BASE), "model.revision": base_revision(settings)}
    kind = "dora" if settings.get("use_dora") else "qlora" if nf4.has_config(path) else "lora"
    named = {key: value for key, value in model.items() if value}
    return {**named, "adapter": kind, "adapter.path": str(path)}


def name_base(export: Path, base: Path) -> None:
    """Name the folder ``base`` as the base model in adapter_config.json of the folder ``export``."""
    amend(export / CONFIG, {BASE: str(base.absolute()), REVISION: None})


def base_revision(settings: Json) -> str | None:
    """Return the revision of the base model in ``settings``, the content of an adapter_config.json.

    A base model written by a run is a folder. An older run left the revision of its initial model there.
    """
    return None if str(settings.get(BASE) or "").startswith("/") else settings.get(REVISION)


def check_tensors(path: str, shapes: Mapping[str, torch.Size], rename: Rename) -> None:
    """Raise ConfigError if the folder does not hold exactly the tensors ``shapes`` (by names in memory)."""
    with open_file(adapter_file(path, TENSORS), "adapter.path") as file:
        stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    missing = [name for name in shapes if PREFIX + rename(name) not in stored]
    extra = sorted(stored.keys() - {PREFIX + rename(name) for name in shapes})
    if missing or extra:
        what = f"lacks {PREFIX + missing[0]}" if missing else f"has the unexpected {extra[0]}"
        raise ConfigError(
            f"adapter.path: {path} {what} ({len(missing)} missing, {len(extra)} too many); it is an adapter "
            "of another model, or of other modules than those that are asked for; use its own model, and "
            "leave out adapter.target_modules and adapter.modules_to_save."
        )
    for name, shape in shapes.items():
        found = stored[PREFIX + rename(name)]
        if tuple(found) != tuple(shape):
            raise ConfigError(
                f"adapter.path: {path}: {name} is {found}, but the model needs "
                f"{list(shape)}; it is an adapter of another model."
            )


def stored_weights(path: str, rename: Rename) -> WeightSource:
    """Return a source that reads a tensor of the folder on each request, by its name in memory.

    ``rename`` maps names in memory to names in files.
    """
    path_of_file = adapter_file(path, TENSORS)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        with open_file(path_of_file, "adapter.path") as file:
            key = PREFIX + rename(name)
            return file.get_slice(key)[index] if index else file.get_tensor(key)

    return read
