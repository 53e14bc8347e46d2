"""Weights of a saved model, read one tensor at a time."""

import copy
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache, reduce
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME as INDEX
from transformers.utils import SAFE_WEIGHTS_NAME

from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.json_text import as_type, one_line, read_json
from components.models.experts import unstack_experts
from components.models.export.hf_file_names import file_names
from components.models.hub import BIN
from components.models.mtp import JOINS, mtp_parameter_names
from components.models.scalar_head import SCORE, auto_class, has_scalar_head
from components.models.weights import named_shapes, tied_names

log = logging.getLogger(__name__)

STORED = ("F64", "F32", "F16", "BF16")
"""Types of safetensors that weights may have."""
INTEGERS = ("BOOL", "U8", "I32", "I64")
"""Types of masks and indices that older files hold next to the weights."""
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""dtype of torch -> name of the type in safetensors."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")

Places = Mapping[str, tuple[Path, str]]
"""Name of a tensor in memory -> its file, and its name in that file."""


def pretrained_weights(
    folder: Path,
    model: PreTrainedModel,
    *,
    drawn: WeightSource | None = None,
    trust_remote_code: bool = False,
) -> WeightSource:
    """Return the weights in ``folder`` under the names of ``model``, of which only the shapes are read.

    ``model`` may be on any device. If the safetensors files hold all of these names, only the requested part
    of a tensor is read, on each request. Otherwise (an older layout, .bin files) transformers converts the
    whole model on CPU, with a warning in the log. Weights of MTP layers and of a scalar head that the files
    lack come from ``drawn``, also with a warning. Other tensors in the files are only logged.

    Raises:
        ConfigError: if there are no weights, a file is unreadable, a parameter is missing, quantised or of
            another shape, or tied parameters have two values.
    """
    shapes, tied, files = named_shapes(model), tied_names(model), stored_names(folder)
    rename = file_names(model.config.model_type)
    places = {name: (files[stored], stored) for name in (*shapes, *tied) if (stored := rename(name)) in files}
    unread = files.keys() - {stored for _, stored in places.values()}
    added = mtp_parameter_names(shapes, model.config)
    if has_scalar_head(model):  # in place of the head of a language model
        unread = {name for name in unread if not name.startswith("lm_head.")}
        added |= {f"{SCORE}.weight"}
    lacking = added - places.keys()
    shapes = {name: shape for name, shape in shapes.items() if name not in lacking}
    if shapes.keys() <= places.keys():
        weights, found = lazy_weights(folder, shapes, places), set(places)
        log_unexpected(folder, set(unused_names(unread, model)))
    else:
        log.warning("%s: not under the names of %s; converting on CPU.", folder, type(model).__name__)
        tensors = converted_weights(folder, model, trust_remote_code)
        lacking = added - tensors.keys()
        weights, found = in_memory(tensors), set(tensors)
    for alias in tied.keys() & found:
        if not torch.equal(weights(alias), weights(tied[alias])):
            raise ConfigError(
                f"model.path: {folder}: {alias} and {tied[alias]} differ, but config.json ties them; "
                "set its tie_word_embeddings to false."
            )
    return weights if drawn is None or not lacking else completed(weights, drawn, lacking, folder)


def completed(weights: WeightSource, drawn: WeightSource, lacking: set[str], folder: Path) -> WeightSource:
    """Return a source that takes the weights named in ``lacking`` from ``drawn``, others from ``weights``.

    Log a warning that ``folder`` does not contain the former.
    """
    message = (
        "%s: has no %s (%d lacking). Unless an adapter or a checkpoint has these weights, they begin at "
        "random."
    )
    log.warning(message, folder, min(lacking), len(lacking))

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return (drawn if name in lacking else weights)(name, index)

    return read


def unused_names(names: Iterable[str], model: PreTrainedModel) -> Iterator[str]:
    """Yield the ``names`` outside of MTP layers, which DeepSeek's files have after all other layers."""
    last = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    found = {name: LAYER.match(name) for name in names}
    mtp = {
        layer[1]
        for name, layer in found.items()
        if layer and int(layer[1]) >= last and name[layer.end() :].partition(".")[0] in JOINS
    }
    yield from (name for name, layer in found.items() if layer is None or layer[1] not in mtp)


def content_hash(folder: Path) -> str:
    """Return a hash of all bytes of the folder's weights, independent of the folder's name."""
    files = sorted(set(stored_names(folder).values())) or sorted(folder.glob(BIN))
    return hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file, which is the file's name if it is in the cache of the hub.

    A process reads a file only once, unless its size or modification time changes.
    """
    if re.fullmatch("[0-9a-f]{64}", path.resolve().name):
        return path.resolve().name
    stat = path.stat()
    return _sha256(path, stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(path: Path, _size: int, _time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stored_names(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor in the folder's safetensors files; empty if there are none.

    As in transformers, model.safetensors takes precedence over an index.

    Raises:
        ConfigError: if the index is malformed, a file that it names is missing, or a single file is
            unreadable.
    """
    if (whole := folder / SAFE_WEIGHTS_NAME).is_file():
        return dict.fromkeys(open_file(whole).keys(), whole)
    if (folder / INDEX).is_file():
        try:
            weight_map = as_type(dict[str, str], read_json(folder / INDEX).get("weight_map"))
        except ValueError as error:
            raise ConfigError(f"model.path: {folder / INDEX}: weight_map: {error}; copy it again.") from error
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise ConfigError(
                    f"model.path: {folder / file} is missing, but {INDEX} names it; copy it again."
                )
        return {name: folder / file for name, file in weight_map.items()}
    return {}


def open_file(path: Path, option: str = "model.path") -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {one_line(error)}; copy it again.") from error


def stored_slice(file: safe_open, path: Path, name: str) -> Any:
    """Return the tensor ``name`` of the opened file ``path``, of which nothing is read yet."""
    try:
        return file.get_slice(name)
    except SafetensorError as error:
        raise ConfigError(
            f"model.path: {path} does not hold {name}, but {INDEX} says so; copy both again."
        ) from error


def lazy_weights(folder: Path, shapes: Mapping[str, torch.Size], places: Places) -> WeightSource:
    opened = cache(open_file)
    for name, shape in shapes.items():
        file, stored = places[name]
        part = stored_slice(opened(file), file, stored)
        if part.get_dtype() not in STORED:
            raise quantised(file, stored, part.get_dtype())
        check_shape(folder, stored, part.get_shape(), shape)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        path, stored = places[name]
        # Opened for each read, because pages read from an open file stay in memory while it is mapped.
        file = open_file(path)
        part = stored_slice(file, path, stored)
        return part[index] if index else file.get_tensor(stored)

    return read


def in_memory(tensors: Mapping[str, Tensor]) -> WeightSource:
    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        return tensors[name][index]

    return read


def quantised(file: Path, name: str, stored: str) -> ConfigError:
    return ConfigError(
        f"model.path: {file}: {name} is stored as {stored}; quantised weights cannot be trained. Use a model "
        f"with weights stored as {', '.join(STORED)}."
    )


def widest_dtype(folder: Path) -> torch.dtype:
    """Return the smallest dtype that represents the values of all weights that are to be converted exactly.

    Integer tensors, such as masks, are ignored, and so are the rotary frequencies (``inv_freq``) in older
    files, because models compute these.

    Raises:
        ConfigError: if a file is unreadable or has quantised weights, which transformers would convert to
            floating point without their scales.
    """
    found = set()
    for file, name, stored in stored_types(folder):
        if stored not in STORED and (name.endswith("weight") or stored not in INTEGERS):
            raise quantised(file, name, stored)
        if stored in STORED and not name.endswith("inv_freq"):
            found.add(stored)
    dtypes = [dtype for dtype, code in CODES.items() if code in found]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def stored_types(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield the file, the name and the type (as named in safetensors) of each tensor.

    Raises:
        ConfigError: if a file is unreadable, or contains anything but tensors.
    """
    found = stored_names(folder)
    opened = cache(open_file)
    for name, file in found.items():
        yield file, name, stored_slice(opened(file), file, name).get_dtype()
    for file in () if found else sorted(folder.glob(BIN)):
        try:
            content = torch.load(file, map_location="meta", mmap=is_zipfile(file), weights_only=True)
            tensors = as_type(Json, content)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise ConfigError(f"model.path: cannot read {file}: {one_line(error)}; copy it again.") from error
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise ConfigError(f"model.path: {file}: {name} is a {kind}, not a tensor; copy it again.")
            yield file, name, CODES.get(tensor.dtype, str(tensor.dtype))


def converted_weights(folder: Path, model: PreTrainedModel, trust_remote_code: bool) -> dict[str, Tensor]:
    """Return every parameter as ``from_pretrained`` reads it; tied ones twice if they have two values.

    They have the ``widest_dtype`` of the files. With dtype="auto", transformers would round them to that of
    the first tensor.

    Raises:
        ConfigError: if a file is unreadable, or a parameter is missing, quantised or of another shape.
    """
    dtype = widest_dtype(folder)
    try:
        loaded, info = auto_class(scalar=has_scalar_head(model)).from_pretrained(
            folder,
            config=copy.deepcopy(model.config),
            dtype=dtype,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # these are reported below, by name
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.path: {folder} holds no readable weights: {one_line(error)}") from error
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        check_shape(folder, name, stored, wanted)
    missing = info["missing_keys"]
    for name in sorted(missing - {f"{SCORE}.weight"}):
        raise ConfigError(
            f"model.path: {folder} has no weight {name} ({len(missing)} missing); "
            "its config.json describes another model."
        )
    log_unexpected(folder, info["unexpected_keys"])
    tensors = [*loaded.named_parameters(), *persistent_buffers(loaded)]
    return {name: tensor.detach() for name, tensor in unstack_experts(tensors) if name not in missing}


def log_unexpected(folder: Path, names: Set[str]) -> None:
    if names:
        log.warning(
            "%s: %d tensors that the model does not have, such as %s.", folder, len(names), min(names)
        )


def persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    kept = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def check_shape(folder: Path, name: str, stored: Iterable[int], wanted: torch.Size) -> None:
    if tuple(stored) != tuple(wanted):
        raise ConfigError(
            f"model.path: {folder}: {name} has the shape {list(stored)}, but {list(wanted)} by config.json; "
            "use the config.json that belongs to these weights."
        )
