"""Selection of the modules that an adapter trains."""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from components.contracts.errors import ConfigError
from components.models.experts import EXPERT_PARAM, moe_blocks
from components.models.export.hf_file_names import our_name
from components.models.hf_config import closest_word
from components.models.scalar_head import output_head
from components.models.weights import tied_names

Targets = str | tuple[str, ...]
"""``all-linear``, ``attention``, ``mlp``, or one or several suffixes of module names."""

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
PARTS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", *LATENT),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
"""Names of linear layers in Llama and models derived from it. Phi-3 fuses some of these layers; DeepSeek-V3
also has ``LATENT``."""


def linear_targets(model: PreTrainedModel, target: Targets) -> list[str]:
    """Return the names of the linear layers to adapt, in the model's order, without the head, as in peft.

    Raises:
        ConfigError: if ``target`` or a name in it matches nothing, or a name in it matches the head or a
            module that is not linear, or is the full name of one of ``beside_experts``.
    """
    linears = linear_names(model)
    if target == "all-linear":
        found = linears
    elif isinstance(target, str) and target in PARTS:
        found = [name for name in linears if name.rpartition(".")[2] in PARTS[target]]
    else:
        given = (target,) if isinstance(target, str) else target
        words, beside = [our_name(word, model.config.model_type) for word in given], beside_experts(model)
        found = named_modules(model, words, "adapter.target_modules", ("all-linear", *PARTS))
        if named := [word for word in words if word in beside]:
            raise ConfigError(
                f"adapter.target_modules: {named[0]} is not in an expert, and in a model with experts peft "
                "adapts only those by such a name; leave it out."
            )
        found = [name for name in found if name not in beside]
        for name in found:
            check_linear(model, name, linears)
    if not found:
        raise ConfigError(
            f"adapter.target_modules: {target or 'an empty list'} matches no linear layer of "
            f"{model.config.model_type}; name some of its own: "
            f"{', '.join(leaf_names(linears)) or 'it has none'}."
        )
    return found


def linear_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that may be adapted, without the head and ``beside_experts``."""
    head, others = output_head(model), beside_experts(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and name not in others
    ]


def beside_experts(model: PreTrainedModel) -> frozenset[str]:
    """Return the linear layers of dense MLPs and shared experts in an MoE model; empty for a dense model.

    The last parts of their names are also those of layers in routed experts, and peft applies targets with
    such a name only to the routed experts.
    """
    if not moe_blocks(model):
        return frozenset()
    modules = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return frozenset(n for n in modules if n.endswith(PARTS["mlp"]) and not EXPERT_PARAM.match(n))


def leaf_names(names: Sequence[str]) -> list[str]:
    """Return the last parts of ``names``, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def named_modules(
    model: PreTrainedModel, wanted: Sequence[str], option: str, others: Sequence[str] = ()
) -> list[str]:
    """Return the names of modules that are in ``wanted`` or end with a dot and a name in it, as in peft.

    ``others`` are values of ``option`` that are not names of modules; error messages suggest them.

    Raises:
        ConfigError: if a name in ``wanted`` matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for word in wanted:
        if not any(matches(name, word) for name in names):
            hint = closest_word(word, [*others, *leaf_names(names), *names])
            hint = hint or " Give the last part of a module's name, such as q_proj, or its whole name."
            raise ConfigError(f"{option}: {word!r} matches no module of {model.config.model_type}.{hint}")
    return [name for name in names if any(matches(name, word) for word in wanted)]


def matches(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}")


def check_linear(model: PreTrainedModel, name: str, linears: Sequence[str]) -> None:
    if name in linears:
        return
    module = model.get_submodule(name)
    if module is output_head(model):
        raise ConfigError(
            f"adapter.target_modules: {name} is the output head, which cannot be adapted, because it is "
            f"computed together with the loss; train it in full with adapter.modules_to_save=[{name}], or "
            "if adapter.path is set, merge that adapter with peft's merge_and_unload."
        )
    raise ConfigError(
        f"adapter.target_modules: {name} is a {type(module).__name__}; only linear layers are adapted, like "
        f"{', '.join(leaf_names(linears))}; if adapter.path has an adapter of other layers, merge it with "
        "peft's merge_and_unload."
    )


def saved_modules(model: PreTrainedModel, wanted: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the names of the modules that are trained in full, in the model's order.

    Raises:
        ConfigError: if a name matches nothing, or a module that is tied, adapted, a router or an expert, or
            not a single module with parameters.
    """
    found = named_modules(model, wanted, "adapter.modules_to_save")
    tied = tied_names(model)
    shared = {name.rpartition(".")[0] for name in (*tied, *tied.values())}
    routers = {f"{block}.gate" for block in moe_blocks(model)}
    for name in found:
        if name in routers or EXPERT_PARAM.match(name):
            raise ConfigError(
                f"adapter.modules_to_save: {name} belongs to a router or an expert, which "
                "an adapter cannot train in full; leave it out."
            )
        module = model.get_submodule(name)
        if name in shared:
            raise ConfigError(
                f"adapter.modules_to_save: {name} is tied to another module, which would stay as it is; use "
                "a model with tie_word_embeddings=false, or leave it out."
            )
        if name in targets or any(module.children()) or not any(True for _ in module.parameters()):
            why = "is adapted too" if name in targets else "is not a single module with parameters"
            raise ConfigError(
                f"adapter.modules_to_save: {name} {why}; name a norm, an embedding, the head or a linear "
                "layer that adapter.target_modules leaves out."
            )
    return found


def check_expert_targets(
    model: PreTrainedModel, targets: Sequence[str], others: Mapping[str, object]
) -> None:
    """Raise ConfigError if peft could not read an adapter of the expert layers ``targets``.

    transformers holds the experts of a layer in two tensors, and peft adapts each tensor as a whole.
    ``others`` are the adapter's keys that are not supported for experts, with their values.
    """
    if not targets:
        return
    for key, value in others.items():
        if value:
            raise ConfigError(
                f"adapter.{key}: is {value}, which peft does not support for the experts in "
                "adapter.target_modules; leave it out, or use adapter.target_modules=attention."
            )
    if lacking := adapted_and_not(model, targets):
        raise ConfigError(
            f"adapter.target_modules: {lacking[0]} is adapted and {lacking[1]} is not, but peft adapts "
            "gate_proj and up_proj of all experts in all layers or of none, and likewise down_proj; name "
            "gate_proj and up_proj, or use adapter.target_modules=attention."
        )


def adapted_and_not(model: PreTrainedModel, targets: Sequence[str]) -> tuple[str, str] | None:
    """Return an adapted and an unadapted layer of a group of layers that peft adapts only together.

    None means that each group is adapted either completely or not at all.
    """
    wanted = set(targets)
    for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
        names = [n for n in linear_names(model) if EXPERT_PARAM.match(n) and n.endswith(leaves)]
        inside = [name for name in names if name in wanted]
        if inside and len(inside) < len(names):
            return inside[0], next(name for name in names if name not in wanted)
    return None
