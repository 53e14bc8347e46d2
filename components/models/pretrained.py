"""Weights of a saved model, read one tensor at a time."""

import copy
import hashlib
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.models.folder import one_line, read_json
from components.models.weights import WeightSource, named_shapes, tied_names
from runner.errors import ConfigError

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


def pretrained_weights(
    folder: Path, model: PreTrainedModel, *, trust_remote_code: bool = False
) -> WeightSource:
    """The weights in ``folder`` under the names of ``model`` (on any device; only its shapes are read).

    Where the safetensors files hold exactly these names, each tensor is read when it is asked for, and of
    it only the part that is asked for.
    Otherwise (an older layout, .bin files) transformers converts the whole model on CPU, and the log says so.

    Raises:
        ConfigError: no weights, an unreadable file, a parameter that is missing or of another shape, or two
            values for tied parameters.
    """
    shapes, tied, files = named_shapes(model), tied_names(model), stored_names(folder)
    if shapes.keys() <= files.keys() <= shapes.keys() | tied.keys():
        weights = lazy_weights(folder, shapes, files)
        stored_twice = {alias: lazy_tensor(files, alias) for alias in tied.keys() & files.keys()}
    else:
        log.warning("%s: not under the names of %s; converting on CPU.", folder, type(model).__name__)
        tensors = converted_weights(folder, model, shapes, trust_remote_code)
        weights = in_memory(tensors)
        stored_twice = {alias: tensors[alias] for alias in tied.keys() & tensors.keys()}
    for alias, value in stored_twice.items():
        if not torch.equal(value, weights(tied[alias])):
            raise ConfigError(
                f"model.path: {folder}: {alias} and {tied[alias]} differ, but config.json ties them; "
                "set its tie_word_embeddings to false."
            )
    return weights


def content(folder: Path) -> str:
    """A hash of every byte of the folder's weights, whatever it is called."""
    files = sorted(set(stored_names(folder).values())) or sorted(folder.glob("*.bin"))
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """The file's sha256, which the cache of the hub has in its name."""
    if re.fullmatch("[0-9a-f]{64}", path.resolve().name):
        return path.resolve().name
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored_names(folder: Path) -> dict[str, Path]:
    """Every tensor in the folder's safetensors files, and the file it is in; empty where there are none."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise ConfigError(
                    f"model.path: {folder / file} is missing, but {INDEX} names it; copy it again."
                )
        return {name: folder / file for name, file in weight_map.items()}
    whole = folder / "model.safetensors"
    return dict.fromkeys(open_file(whole).keys(), whole) if whole.is_file() else {}


def open_file(path: Path, option: str = "model.path") -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {one_line(error)}; copy it again.") from error


def lazy_weights(folder: Path, shapes: Mapping[str, torch.Size], files: Mapping[str, Path]) -> WeightSource:
    opened = cache(open_file)
    for name, shape in shapes.items():
        try:
            stored = opened(files[name]).get_slice(name).get_shape()
        except SafetensorError as error:
            raise ConfigError(
                f"model.path: {files[name]} does not hold {name}, but {INDEX} says so."
            ) from error
        check_shape(folder, name, stored, shape)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        # Opened again each time: what is read of an open file stays in memory, as a page of its mapping.
        file = open_file(files[name])
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    return read


def in_memory(tensors: Mapping[str, Tensor]) -> WeightSource:
    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return tensors[name][index]

    return read


def lazy_tensor(files: Mapping[str, Path], name: str) -> Tensor:
    return open_file(files[name]).get_tensor(name)


def converted_weights(
    folder: Path, model: PreTrainedModel, shapes: Mapping[str, torch.Size], trust_remote_code: bool
) -> dict[str, Tensor]:
    """Every parameter as ``from_pretrained`` reads it; tied ones twice if it found two values for them."""
    config = copy.deepcopy(model.config)
    config.dtype = None  # "auto" then means as stored
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # they are reported below, by name
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path: {folder} holds no readable weights: {one_line(error)}") from error
    for name, stored, _ in sorted(info["mismatched_keys"]):
        check_shape(folder, name, stored, shapes[name])
    for name in sorted(info["missing_keys"]):
        raise ConfigError(
            f"model.path: {folder} has no weight {name} ({len(info['missing_keys'])} missing); "
            "its config.json describes another model."
        )
    if info["unexpected_keys"]:
        extra = sorted(info["unexpected_keys"])
        log.warning("%s: %d tensors that the model has no place for, like %s.", folder, len(extra), extra[0])
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


def check_shape(folder: Path, name: str, stored: Any, wanted: torch.Size) -> None:
    if tuple(stored) != tuple(wanted):
        raise ConfigError(
            f"model.path: {folder}: {name} is {list(stored)}, but its config.json asks for {list(wanted)}."
        )
