"""Configurations of transformers, made from a description or read from a folder."""

import dataclasses
import difflib
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from components.json_text import one_line, read_json
from components.run_exports import hint_for_run

INVALID = (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError)
"""Exceptions of transformers for configurations that it cannot build."""

ELSEWHERE = {
    "dtype": "run.dtype",
    "output_router_logits": "model.moe.aux_loss",
    "router_aux_loss_coef": "model.moe.aux_loss_coef",
    "num_mtp_layers": "model.mtp.num_layers",
    "num_nextn_predict_layers": "model.mtp.num_layers",
}
"""Configuration fields that would be ignored -> the option to use instead."""

NO_EFFECT = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")
"""Configuration fields that change nothing in training."""

UNDECLARED = {"qwen3_moe": {"head_dim"}}
"""Fields that a model reads and files contain, but that transformers does not declare."""


def make_config(architecture: Config) -> PreTrainedConfig:
    """Return the transformers configuration that ``model.architecture`` describes: ``model_type`` and fields.

    Raises:
        ConfigError: if model_type is missing, if it or a key is unknown (with the nearest match), if a key
            would have no effect, or if transformers rejects a value.
    """
    fields = dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.architecture.model_type: is missing; give one, such as qwen3 or llama.")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        hint = closest_word(str(model_type), CONFIG_MAPPING) or " Use one that it has, such as qwen3."
        raise ConfigError(f"model.architecture.model_type: transformers has no {model_type!r}.{hint}")
    kind = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    known |= UNDECLARED.get(model_type, set())
    for key in fields:
        if key in ELSEWHERE:
            raise ConfigError(f"model.architecture.{key}: is not read; use {ELSEWHERE[key]}.")
        if key in NO_EFFECT:
            raise ConfigError(f"model.architecture.{key}: changes nothing in training; leave it out.")
        if key not in known:
            hint = closest_word(key, known) or " Leave it out."
            raise ConfigError(f"model.architecture.{key}: {kind.__name__} has no such field.{hint}")
    try:
        config = kind(**fields)
    except INVALID as error:
        raise ConfigError(f"model.architecture: {one_line(error)}") from error
    check_rope(config)
    check_sliding(fields, config)
    return config


def read_hf_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the configuration in ``folder``.

    A ``pad_token_id`` outside of the vocabulary, as in older files, becomes None.

    Raises:
        ConfigError: if config.json is missing or malformed, model_type is unknown, the folder's model code is
            not trusted, the weights have names of their own, or transformers rejects the configuration.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path: {folder} has no config.json; give the folder of a saved transformers model."
            f"{hint_for_run(folder)}"
        )
    raw = read_json(path)
    model_type = raw.get("model_type")
    if not (isinstance(model_type, str) and model_type in CONFIG_MAPPING) and not trust_remote_code:
        if "auto_map" in raw:
            raise ConfigError(
                f"model.trust_remote_code: is false, but {folder} brings its own model code; "
                "read it, then set model.trust_remote_code=true."
            )
        hint = closest_word(str(model_type), CONFIG_MAPPING)
        raise ConfigError(f"model.path: {path}: transformers has no model_type {model_type!r}.{hint}")
    if file := raw.get("transformers_weights"):
        raise ConfigError(
            f"model.path: {path}: transformers_weights is {file}, but weights are read from "
            "model.safetensors or the files of its index; rename the files, and remove this field."
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (*INVALID, OSError, ImportError) as error:
        raise ConfigError(
            f"model.path: {path}: transformers cannot load its configuration ({one_line(error)}); correct "
            "this, or name another model."
        ) from error
    text = config.get_text_config()
    pad, size = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", None)
    if pad is not None and (pad < 0 or (size is not None and pad >= size)):
        text.pad_token_id = None
    return config


def check_same(architecture: Config, config: PreTrainedConfig, path: str) -> None:
    """Raise ConfigError if ``architecture``, which would be ignored, differs from ``config``."""
    made = make_config(architecture)
    if made.model_type != config.model_type:
        raise ConfigError(
            f"model.architecture.model_type: is {made.model_type}, but model.path={path} is "
            f"{config.model_type}; use model=hf, which reads the architecture from model.path."
        )
    for key, value in architecture.items():
        if value is not None and getattr(made, key) != (found := getattr(config, key, None)):
            raise ConfigError(
                f"model.architecture.{key}: is {value}, but model.path={path} has {found}; "
                "the shape cannot be changed with model.init=pretrained."
            )


def check_rope(config: PreTrainedConfig) -> None:
    """Raise ConfigError if the rope_type is unknown.

    transformers only warns, and then fails when it builds the model.
    """
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    known = {"default", *ROPE_INIT_FUNCTIONS}
    if not isinstance(rope_type, str) or rope_type not in known:
        hint = closest_word(str(rope_type), known) or " Use default, or one that transformers has."
        raise ConfigError(f"model.architecture.rope_parameters.rope_type: no {rope_type!r}.{hint}")


def check_sliding(fields: Config, config: PreTrainedConfig) -> None:
    """Raise ConfigError if ``fields`` ask for a sliding window, and no layer of ``config`` has one.

    Some families have none without ``use_sliding_window``, whatever the other fields say.
    """
    has_window = reads_sliding_window(config) and getattr(config, "sliding_window", None) is not None
    asked = [key for key in ("sliding_window", "use_sliding_window") if fields.get(key)]
    if "sliding_attention" in (fields.get("layer_types") or ()):
        asked.append("layer_types")
    if asked and not has_window:
        raise ConfigError(
            f"model.architecture.{asked[0]}: is {fields[asked[0]]}, but every layer of this "
            f"{config.model_type} attends to all positions; set sliding_window, use_sliding_window=true and "
            "(if the family has it) a max_window_layers below num_hidden_layers, or leave it out."
        )


def reads_sliding_window(config: PreTrainedConfig) -> bool:
    """Return whether the model of ``config`` has a layer that uses ``sliding_window`` if this is not None.

    A config.json may contain the field although the model's class does not read it, as for llama.
    """
    is_read = "sliding_window" in {field.name for field in dataclasses.fields(config)}
    return is_read and "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def closest_word(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=3)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
