"""transformers' own initial values, one tensor at a time.

A model on the meta device is the recipe: one tensor of it is made real, transformers' ``_init_weights`` is
run on the modules around it, and the random draws that hit the other tensors cost and do nothing.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from components.contracts.errors import ConfigError
from components.models.hf_private import computed_buffers, init_weights, initialized
from components.models.weights import WeightSource


def random_weights(model: PreTrainedModel, seed: int) -> WeightSource:
    """Each parameter as a function of (``seed``, its name) alone: float32, drawn on CPU.

    So its value is the same on every rank and in every layout, for any number of layers, and in any order
    of calls; no global random state is read or changed. ``model`` must stay on the meta device.

    Raises:
        ConfigError: (from the source) transformers has no initial value for the parameter.
    """

    def draw(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        # An ancestor may change what the owner drew (GPT-2 scales c_proj by depth), so all have their say.
        owner, _, leaf = name.rpartition(".")
        with real_parameter(model.get_submodule(owner), leaf) as tensor, seeded(seed, name):
            for rules, module in initializers(model, owner):
                init_weights(rules, module)
        if tensor.isnan().any():
            raise ConfigError(
                f"model.init=random: transformers has no initial value for {name} of {type(model).__name__}; "
                "use model.init=pretrained."
            )
        return tensor[index]

    return draw


def initializers(model: PreTrainedModel, path: str) -> list[tuple[PreTrainedModel, nn.Module]]:
    """The module at ``path`` and those around it, innermost first, each with the model that rules it."""
    rules, module, found = model, model, [(model, model)]
    for part in path.split(".") if path else ():
        module = getattr(module, part)
        rules = module if isinstance(module, PreTrainedModel) else rules
        found.append((rules, module))
    return found[::-1]


@contextmanager
def real_parameter(owner: nn.Module, leaf: str) -> Iterator[Tensor]:
    """The parameter ``leaf`` of ``owner`` as a CPU tensor full of NaN, while the context lasts."""
    virtual = owner.get_parameter(leaf)
    assert virtual.is_meta, f"{leaf}: the model that random weights are drawn from must stay on meta"
    real = torch.full(virtual.shape, torch.nan, dtype=torch.float32, device="cpu")
    setattr(owner, leaf, nn.Parameter(real, requires_grad=False))
    try:
        yield real
    finally:
        setattr(owner, leaf, virtual)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """torch's CPU generator seeded from (``seed``, ``name``); as it was before, afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed CUDA too, which fork_rng is told to leave alone.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield


@torch.no_grad()
def materialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Brings back what ``model.to_empty(device=device)`` lost, but for the values of parameters.

    Non-persistent buffers (rotary frequencies) are computed again, on ``device`` and in float32 whatever
    ``model.to(dtype)`` made of them, as transformers keeps them. Tied parameters, which ``to_empty`` makes
    two of, become one again.

    Raises:
        ConfigError: transformers does not say how a buffer is computed.
    """
    for tied, source in model.all_tied_weights_keys.items():
        owner, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    for path, module in model.named_modules():
        buffers = {name: getattr(module, name) for name in computed_buffers(module)}
        if not any(buffer is not None for buffer in buffers.values()):
            continue
        for name, buffer in buffers.items():
            setattr(module, name, blank(buffer, device))
        rules, _ = initializers(model, path)[0]
        with initialized(module.parameters()), guard_torch_init_functions():
            init_weights(rules, module)
        for name in buffers:
            if is_blank(getattr(module, name)):
                raise ConfigError(
                    f"model: transformers does not say how to compute the buffer {path}.{name}."
                )


def blank(buffer: Tensor | None, device: torch.device) -> Tensor | None:
    """Full of NaN, to be recognised by ``is_blank`` if nothing is written to it."""
    if buffer is None or not buffer.is_floating_point():
        return None if buffer is None else torch.zeros_like(buffer, device=device)
    return torch.full(buffer.shape, torch.nan, dtype=torch.float32, device=device)


def is_blank(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any())
