"""peft's layers inside the engine's model: put there, named as on disk, and switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.adapters.export import peft_config, shortest_suffixes
from components.adapters.targets import linear_names
from components.contracts.errors import ConfigError
from components.models.experts import EXPERT_PARAM
from components.models.hf_private import adapters_off

if TYPE_CHECKING:
    from peft import LoraConfig

ADDED = (".modules_to_save.default", ".original_module", ".base_layer", ".default")
"""What peft puts into the names of parameters; the magnitudes are a module to it, a tensor on disk."""


def check(adapter: LoRA | None, tp: int) -> None:
    """
    Raises:
        ConfigError: ``adapter`` has a part that ``tp`` ranks cannot split.
    """
    if adapter is None or tp == 1:
        return
    for key, value in {"dora": adapter.dora, "modules_to_save": adapter.modules_to_save}.items():
        if value:
            raise ConfigError(
                f"adapter.{key}: is not split by tensor parallelism; use parallelism.tp=1, or leave it out."
            )
    if adapter.dropout:
        raise ConfigError(
            "adapter.dropout: the ranks of parallelism.tp would drop different inputs of one matrix; set it "
            "to 0, or use parallelism.tp=1."
        )


def describe_adapter(adapter: LoRA, model: PreTrainedModel) -> "LoraConfig":
    """peft's description of what ``adapter`` adapts of ``model`` but for experts, whose layers are ours."""
    config = peft_config(adapter, model)
    others = [name for name in linear_names(model) if not EXPERT_PARAM.match(name)]
    wanted = frozenset(adapter.targets(model))
    config.target_modules = set(shortest_suffixes([name for name in others if name in wanted], others))
    return config


def inject(model: PreTrainedModel, config: "LoraConfig") -> None:
    """Puts the adapter beside the layers of ``model`` (on the meta device), which is frozen."""
    from peft import inject_adapter_in_model  # here, because it takes seconds

    if config.target_modules:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():  # peft leaves what is not its own frozen
        if not config.target_modules or name.rpartition(".")[0].endswith(".experts.adapter"):
            parameter.requires_grad_(".lora_" in name)


def name_on_disk(name: str) -> str:
    """``q_proj.base_layer.weight`` -> ``q_proj.weight``, ``q_proj.lora_A.default.weight`` ->
    ``q_proj.lora_A.weight``; others as they are."""
    for part in ADDED:
        name = name.replace(part, "")
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """The frozen model alone, without dropout, while the context lasts; without an adapter, the model."""
    training = model.training
    model.eval()
    try:
        with adapters_off(model):
            yield
    finally:
        model.train(training)
