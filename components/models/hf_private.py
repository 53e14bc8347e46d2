"""The private API of transformers and peft that this program uses: every name of it is in this file.

A release may move any of these. ``tests/unit/test_private_api.py`` then fails, with the name. With it is the
one private name of torch that models need: engines, which have the others, are above models.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

CHECKED = {"transformers": ">=5.12,<5.24", "peft": ">=0.17,<0.22"}
"""The releases that this file was checked on."""


def init_weights(model: PreTrainedModel, module: nn.Module) -> None:
    """Give the parameters and buffers of ``module`` alone the initial values that ``model`` has for them."""
    model._init_weights(module)


@contextmanager
def initialized(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Have ``init_weights`` skip ``parameters`` while the context lasts."""
    marked = list(parameters)
    for parameter in marked:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in marked:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether an engine can replace the attention of ``model``, and nothing else mixes tokens."""
    return bool(model._supports_attention_backend and not model._is_stateful)


def block_names(model: PreTrainedModel) -> set[str]:
    """Return the class names of the decoder blocks (``_no_split_modules``); empty if none are named."""
    return set(model._no_split_modules or ())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch off peft's layers, and its modules that are trained whole, while the context lasts.

    peft's own switch also makes them want no gradient, which FSDP reads at its first pass.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def computed_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers of ``module`` that no file has, such as rotary frequencies."""
    return sorted(module._non_persistent_buffers_set)
