"""Functions that insert peft's layers into a model and name them as on disk."""

import copy
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.adapters.lora_config import INITIAL
from components.adapters.peft_export import peft_config, shortest_suffixes
from components.adapters.target_modules import linear_names
from components.contracts.errors import ConfigError
from components.engines.shared.adapter_dropout import TokenHashes, channel_hashes, drop
from components.models.experts import EXPERT_PARAM
from components.models.nf4 import NF4Linear
from components.models.scalar_head import SCORE

if TYPE_CHECKING:
    from peft import LoraConfig

ADDED = (".modules_to_save.default", ".original_module", ".base_layer", ".default")
"""Parts that peft adds to parameter names. The magnitudes of DoRA are a module in peft, but a tensor on
disk."""


def check(adapter: LoRA | None, tp: int) -> None:
    """Check that FSDP can shard ``adapter``, and that ``tp`` ranks can split it.

    Raises:
        ConfigError: if ``adapter`` quantises and torch is too old; or if ``tp`` is above 1, and ``adapter``
            is DoRA, quantises, or trains modules other than the scalar head in full.
    """
    if adapter is None:
        return
    # The FSDP of an older torch wraps every sharded tensor in a parameter with a gradient.
    if adapter.quantize and torch.__version__ < "2.12":
        raise ConfigError(
            f"adapter.quantize: nf4 needs torch 2.12 or newer, and this is {torch.__version__}; "
            "pip install 'torch>=2.12', or use adapter=lora."
        )
    if tp == 1:
        return
    saved = set(adapter.modules_to_save) - {SCORE}
    others = {"dora": adapter.dora, "modules_to_save": saved, "quantize": adapter.quantize}
    for key, value in others.items():
        if value:
            raise ConfigError(
                f"adapter.{key}: is not split by tensor parallelism; use parallelism.tp=1, or leave it out."
            )


class AdapterDropout(nn.Module):
    """The dropout of the input of one adapted layer, in place of peft's."""

    def __init__(self, channels: Tensor, hashes: TokenHashes, probability: float) -> None:
        super().__init__()
        self.channels = channels
        """``channel_hashes`` of this rank's channels of the input."""
        self.hashes, self.probability = hashes, probability

    def forward(self, hidden: Tensor) -> Tensor:
        return drop(hidden, self.hashes, self.channels, self.probability) if self.training else hidden


def describe_adapter(adapter: LoRA, model: PreTrainedModel) -> "LoraConfig":
    """Return peft's configuration of ``adapter`` for ``model``, without experts (see ``ExpertAdapter``)."""
    config = peft_config(adapter, model)
    others = [name for name in linear_names(model) if not EXPERT_PARAM.match(name)]
    wanted = frozenset(adapter.targets(model))
    config.target_modules = set(shortest_suffixes([name for name in others if name in wanted], others))
    return config


def inject(model: PreTrainedModel, config: "LoraConfig", *, is_pissa: bool) -> None:
    """Add the adapter to the layers of ``model`` (on the meta device), and freeze the model.

    With ``is_pissa``, each adapted layer also gets its initial factors as a second, frozen adapter, whose
    output it subtracts.
    """
    from peft import inject_adapter_in_model  # here, because it takes seconds
    from peft.tuners.lora import LoraLayer

    if is_pissa:
        subtracted = copy.copy(config)
        subtracted.lora_dropout, subtracted.modules_to_save = 0.0, None
        inject_adapter_in_model(subtracted, model, INITIAL, low_cpu_mem_usage=True)
        del model.peft_config  # otherwise peft would warn of a second adapter
    if config.target_modules:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    for layer in model.modules():
        if is_pissa and isinstance(layer, LoraLayer):
            layer.set_adapter(["default", INITIAL])
            layer.set_scale(INITIAL, -1)
            for factors in (layer.lora_A, layer.lora_B):
                factors[INITIAL].requires_grad_(False)
    for name, parameter in model.named_parameters():  # peft freezes all other parameters
        if not config.target_modules or name.rpartition(".")[0].endswith(".experts.adapter"):
            parameter.requires_grad_(".lora_" in name or name == f"{SCORE}.weight")


def replace_dropout(model: nn.Module, hashes: TokenHashes, device: torch.device) -> None:
    """Replace peft's dropout by one that is the same in every layout and reads ``hashes`` in each pass."""
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        own = layer.lora_dropout if isinstance(layer, LoraLayer) else {}
        for adapter, dropout in own.items():
            if isinstance(dropout, nn.Dropout):
                channels = channel_hashes(name, range(layer.in_features), device)
                own[adapter] = AdapterDropout(channels, hashes, dropout.p)


def quantize_layers(model: PreTrainedModel, names: Collection[str]) -> None:
    """Replace the linear layers whose weights are ``names`` on disk by layers with matrices in 4 bits."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name_on_disk(f"{name}.weight") in names:
            model.set_submodule(name, NF4Linear(module))


def name_on_disk(name: str) -> str:
    """Return the name on disk of the parameter ``name``; names that peft did not change stay.

    ``q_proj.base_layer.weight`` -> ``q_proj.weight``,
    ``q_proj.lora_A.default.weight`` -> ``q_proj.lora_A.weight``.
    """
    for part in ADDED:
        name = name.replace(part, "")
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def is_initial(name: str) -> bool:
    """Return whether ``name`` is that of a frozen initial factor of PiSSA, which checkpoints contain."""
    return name.endswith(f".{INITIAL}.weight")
