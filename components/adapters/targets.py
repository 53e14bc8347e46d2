"""Which modules of a model an adapter means."""

from collections.abc import Sequence
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from components.models.configs import near
from components.models.weights import tied_names
from runner.errors import ConfigError

Targets = Literal["all-linear", "attention", "mlp"] | tuple[str, ...]

PARTS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
"""As transformers names them in Llama and its descendants; Phi-3 fuses some."""


def linear_targets(model: PreTrainedModel, target: Targets) -> list[str]:
    """Names of linear layers, in the model's order; the head is never one, as peft's ``all-linear`` has it.

    Raises:
        ConfigError: nothing matches, or a module that is no linear layer, or the head.
    """
    linears = linear_names(model)
    if target == "all-linear":
        found = linears
    elif isinstance(target, str):
        found = [name for name in linears if name.rpartition(".")[2] in PARTS[target]]
    else:
        found = named_modules(model, target, "adapter.target")
        for name in found:
            check_linear(model, name, linears)
    if not found:
        raise ConfigError(
            f"adapter.target: {target or 'an empty list'} matches no linear layer of "
            f"{model.config.model_type}; name some of its own: "
            f"{', '.join(short_names(linears)) or 'it has none'}."
        )
    return found


def linear_names(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, nn.Linear) and module is not head]


def short_names(names: Sequence[str]) -> list[str]:
    """The last parts of ``names``, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def named_modules(model: PreTrainedModel, wanted: Sequence[str], option: str) -> list[str]:
    """The modules whose names are, or end with, one of ``wanted`` (whole parts between dots, as in peft)."""
    names = [name for name, _ in model.named_modules() if name]
    for word in wanted:
        if not any(matches(name, word) for name in names):
            hint = near(word, [*short_names(names), *names])
            raise ConfigError(f"{option}: {word!r} matches no module of {model.config.model_type}.{hint}")
    return [name for name in names if any(matches(name, word) for word in wanted)]


def matches(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}")


def check_linear(model: PreTrainedModel, name: str, linears: Sequence[str]) -> None:
    if name in linears:
        return
    module = model.get_submodule(name)
    if module is model.get_output_embeddings():
        raise ConfigError(
            f"adapter.target: {name} is the head, which is computed with the loss; train it whole with "
            f"adapter.modules_to_save=[{name}]."
        )
    raise ConfigError(
        f"adapter.target: {name} is a {type(module).__name__}; only linear layers are adapted, like "
        f"{', '.join(short_names(linears))}."
    )


def saved_modules(model: PreTrainedModel, wanted: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The modules that are trained whole, in the model's order.

    Raises:
        ConfigError: a name matches nothing, or a module that has no parameters of its own alone.
    """
    found = named_modules(model, wanted, "adapter.modules_to_save")
    tied = tied_names(model)
    shared = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
    for name in found:
        module = model.get_submodule(name)
        if name in shared:
            raise ConfigError(
                f"adapter.modules_to_save: {name} is tied to another module, which would stay as it is; use "
                "a model with tie_word_embeddings=false, or leave it out."
            )
        if name in targets or any(module.children()) or not any(True for _ in module.parameters()):
            why = "is adapted too" if name in targets else "is no single module with parameters"
            raise ConfigError(
                f"adapter.modules_to_save: {name} {why}; name a norm, an embedding, the head or a linear "
                "layer that adapter.target leaves out."
            )
    return found
