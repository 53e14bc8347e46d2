"""Merging an adapter into its base model, for programs without support for adapters."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.adapters.lora_config import MAGNITUDE, A, B, LoRA, initial_name
from components.adapters.peft_folder import BASE, CONFIG, adapter_file, base_revision, read_settings
from components.contracts.errors import ConfigError
from components.json_text import read_json
from components.models import ModelSpec, WeightSource, named_shapes, nf4, stream_folder
from components.models.config import has_tokenizer
from components.models.scalar_head import is_classifier


def merge_adapter(
    adapter: str,
    output: str,
    *,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> Path:
    """Merge the adapter in the folder ``adapter`` into its base model; write the result to ``output``.

    The sum is computed in float32, one tensor at a time, and stored in ``dtype``. ``base`` is the folder or
    hub id of the base model. None means the one that adapter_config.json names. ``trust_remote_code`` allows
    the code that this model brings.

    Raises:
        ConfigError: if a folder cannot be read, the adapter is for another model, or ``output`` is not empty.
    """
    target = new_folder(output)
    spec = base_of(adapter, base, trust_remote_code=trust_remote_code)
    try:
        spec.folder()
    except ConfigError as error:
        if base is not None:
            raise ConfigError(f"base={base}: cannot be read ({error})") from error
        raise ConfigError(
            f"adapter={adapter}: its base model cannot be read ({error}) Give base=DIR, or correct {BASE} in "
            f"its {CONFIG}."
        ) from error
    model = spec.meta_model
    frozen: Literal["nf4"] | None = "nf4" if nf4.has_config(Path(adapter).expanduser()) else None
    described = LoRA(**read_settings(adapter), init_lora_weights=None, path=adapter, quantize=frozen)
    described.check(model)
    weights = spec.weights(0)
    merged = merged_weights(described, model, weights, described.weights(model, 0, weights))
    stream_folder(spec, named_shapes(model), merged, target, dtype)
    spec.add_tokenizer(target)
    return target


def new_folder(output: str) -> Path:
    """Return ``output`` as a path, or raise ConfigError if it is a file or a folder that is not empty."""
    target = Path(output).expanduser()
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ConfigError(f"output={output}: is not an empty folder; name a new one.")
    return target


def merged_weights(
    adapter: LoRA, model: PreTrainedModel, weights: WeightSource, own: WeightSource
) -> WeightSource:
    """Return a source of the ``weights`` of ``model`` merged with the adapter's ``own``, in float32.

    Matrices that were frozen in 4 bits are rounded to their 4-bit values, with which the adapter was trained.
    """
    shapes, quantized = adapter.shapes(model), adapter.quantized_weights(model)

    def read(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        value = (own if name in shapes else weights)(name).float()
        value = nf4.rounded(value) if name in quantized else value
        return added(value, name.removesuffix(".weight"), shapes, own, adapter)[index]

    return read


def base_of(adapter: str, base: str | None, *, trust_remote_code: bool) -> ModelSpec:
    """Return the base model of ``adapter``, with the tokenizer in the adapter's folder if there is one.

    Raises:
        ConfigError: if adapter_config.json cannot be read, or names no base model and ``base`` is None.
    """
    config = read_json(adapter_file(adapter, CONFIG))
    named = config.get(BASE)
    if base is None and not (named and isinstance(named, str)):
        raise ConfigError(f"adapter={adapter}: names no model ({BASE}); give base=DIR.")
    folder = Path(adapter).expanduser()
    return ModelSpec(
        path=base or named,
        init="pretrained",
        revision=None if base else base_revision(config),
        trust_remote_code=trust_remote_code,
        tokenizer=adapter if has_tokenizer(folder) else None,
        scalar_head=is_classifier(folder),
    )


def added(
    weight: Tensor, module: str, shapes: dict[str, torch.Size], own: WeightSource, adapter: LoRA
) -> Tensor:
    """Return ``weight`` of ``module``, merged with its adapter by the formulas of ``LoRA``.

    A merged weight is float32 ``[out, in]``. The weight of a module without an adapter, of any shape, is
    returned unchanged. ``shapes`` and ``own`` give the shapes and the values of the adapter's tensors.
    """
    if module + A not in shapes:
        return weight
    weight = weight + adapter.scaling * own(module + B).float() @ own(module + A).float()
    if adapter.is_pissa:
        initial_a, initial_b = (own(initial_name(module + factor)).float() for factor in (A, B))
        weight = weight - adapter.scaling * initial_b @ initial_a
    if module + MAGNITUDE not in shapes:
        return weight
    lengths = torch.linalg.vector_norm(weight, dim=1)
    return weight * (own(module + MAGNITUDE).float() / lengths)[:, None]
