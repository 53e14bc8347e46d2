"""All uses of the private API of transformers and peft in this program.

A release may move any of the private names; ``tests/unit/test_private_api.py`` then fails and names it. This
file also has the one private name of torch that models need. Other private names of torch are in the engines,
which models must not import.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from transformers import PreTrainedModel

CHECKED = {"transformers": ">=5.12,<5.25", "peft": ">=0.18,<0.22"}
"""The releases with which this file was tested."""


def init_weights(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialise the parameters and buffers of ``module``, not of its children, by the rules of ``model``."""
    model._init_weights(module)


@contextmanager
def initialized(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make ``init_weights`` skip ``parameters`` inside the context."""
    marked = list(parameters)
    for parameter in marked:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter in marked:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether an engine can replace the attention of ``model`` and no other module mixes tokens."""
    return bool(model._supports_attention_backend and not model._is_stateful)


def block_names(model: PreTrainedModel) -> set[str]:
    """Return the class names of the decoder blocks (``_no_split_modules``); empty if none are named."""
    return set(model._no_split_modules or ())


@contextmanager
def adapters_off(*models: nn.Module) -> Iterator[None]:
    """Disable the adapter layers and the modules that are trained in full, inside the context.

    peft's own method also clears requires_grad, which FSDP reads in its first forward pass.
    """
    modules = chain.from_iterable(model.modules() for model in models)
    layers: list[Any] = [module for module in modules if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def computed_buffers(module: nn.Module) -> list[str]:
    """Return the names of the non-persistent buffers of ``module``, such as rotary frequencies."""
    return sorted(module._non_persistent_buffers_set)
