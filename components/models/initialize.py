"""The initial values of transformers, computed one tensor at a time.

The model is on the meta device. For each value, one of its tensors is replaced by a real one, and
transformers' ``_init_weights`` runs on the modules around it. Random draws for the other tensors, on the meta
device, have no cost and no effect.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from components.contracts.configs import WeightSource
from components.contracts.errors import ConfigError
from components.models.hf_private import computed_buffers, init_weights, initialized


def random_weights(model: PreTrainedModel, seed: int) -> WeightSource:
    """Return a source that draws each parameter on CPU in float32, as a function of ``seed`` and its name.

    The value of a parameter is therefore the same on every rank and in every layout, for any number of
    layers, and in any order of calls. No global random state is read or changed. ``model`` must stay on the
    meta device.

    Raises:
        ConfigError: (from the source) if transformers has no initial value for the parameter.
    """

    def draw(name: str, index: tuple[slice, ...] = ()) -> Tensor:
        # An ancestor may change the owner's values (GPT-2 scales c_proj by depth), so all of them run.
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
    """Return the module at ``path`` and its ancestors, innermost first, each with the enclosing model."""
    rules, module, found = model, model, [(model, model)]
    for part in path.split(".") if path else ():
        module = getattr(module, part)
        rules = module if isinstance(module, PreTrainedModel) else rules
        found.append((rules, module))
    return found[::-1]


@contextmanager
def real_parameter(owner: nn.Module, leaf: str) -> Iterator[Tensor]:
    """Replace the parameter ``leaf`` of ``owner`` by a CPU tensor full of NaN, inside the context."""
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
    """Seed torch's CPU generator from (``seed``, ``name``) and restore its state afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed CUDA, whose state fork_rng(devices=[]) does not restore.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big"))
        yield


@torch.no_grad()
def materialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Restore what ``model.to_empty(device=device)`` lost, except the values of parameters.

    Non-persistent buffers (rotary frequencies) are recomputed on ``device`` in float32, as transformers keeps
    them, even if ``model.to(dtype)`` changed their dtype. Tied parameters, which ``to_empty`` separates,
    become one again.

    Raises:
        ConfigError: if transformers does not initialise a buffer.
    """
    for tied, source in model.all_tied_weights_keys.items():
        owner, _, leaf = tied.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    for path, module in model.named_modules():
        buffers = {name: getattr(module, name) for name in computed_buffers(module)}
        buffers = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        if not buffers:
            continue
        for name, buffer in buffers.items():  # NaN shows below whether a float was written
            value, dtype = (torch.nan, torch.float32) if buffer.is_floating_point() else (0, buffer.dtype)
            setattr(module, name, torch.full(buffer.shape, value, dtype=dtype, device=device))
        rules, _ = initializers(model, path)[0]
        with initialized(module.parameters()), guard_torch_init_functions():
            init_weights(rules, module)
        for name in buffers:
            written = getattr(module, name)
            if written.is_floating_point() and written.isnan().any():
                raise ConfigError(
                    f"model: transformers does not say how to compute the buffer {path}.{name}."
                )
