"""Multi-token prediction: layers after the last one, each of which predicts one token further on.

As in DeepSeek-V3 (section 2.2), and where that leaves it open as in Megatron-Core. With ``h_0`` the output of
the last norm, the layer of depth k = 1, 2, ... computes at position t
    ``h_k = norm_k(block_k(eh_proj_k([enorm_k(embed(x[t + k])), hnorm_k(h_{k-1})])))``
and the logits of token t + 1 + k are ``head(h_k)``. Embedding and head are those of the model.

The model that ``ModelSpec`` builds has them where DeepSeek's files have them, as layers past
``num_hidden_layers``, which transformers leaves out of its forward pass: ``model.layers.{N + k - 1}.`` with
``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm`` beside what a layer has.
"""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError
from components.models.experts import MetaLinear

FIELD = "num_nextn_predict_layers"
"""DeepSeek's name for the number of these layers in a configuration; ours have it for every family."""

FAMILIES = ("deepseek_v3", "gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Those whose layers were compared with transformers' own."""

JOINS = ("enorm", "hnorm", "eh_proj", "shared_head")
"""What such a layer has beside what every layer has."""


@dataclass(frozen=True)
class MTPConfig:
    """The terms that further tokens add to the loss, one a depth, each a mean over its own labels."""

    num_layers: int = 0
    loss_coef: float = 0.3
    """Of the mean over depths."""

    def __post_init__(self) -> None:
        if self.num_layers < 0:
            raise ConfigError(f"model.mtp.num_layers: must be at least 0, got {self.num_layers}.")
        if not 0 < self.loss_coef < math.inf:
            raise ConfigError(f"model.mtp.loss_coef: must be a number above 0, got {self.loss_coef}.")
        if self.loss_coef != MTPConfig.loss_coef and not self.num_layers:
            raise ConfigError(
                f"model.mtp.loss_coef: is {self.loss_coef}, but model.mtp.num_layers=0 leaves nothing to "
                f"weigh; set that above 0, or use {MTPConfig.loss_coef}."
            )

    @property
    def loss_names(self) -> tuple[str, ...]:
        return tuple(f"mtp_{depth}_loss" for depth in range(1, self.num_layers + 1))

    @property
    def coefficient(self) -> float:
        """The coefficient of one depth."""
        return self.loss_coef / max(self.num_layers, 1)

    def batches(self, batch: Batch) -> tuple[Batch, ...]:
        """By depth, what its layer is given and has to predict."""
        return tuple(batch.shifted(depth) for depth in range(1, self.num_layers + 1))

    def counts(self, batch: Batch) -> dict[str, int]:
        """What each term is a mean over: the positions whose token so far on has a label."""
        batches = zip(self.loss_names, self.batches(batch), strict=True)
        return {name: len(ahead.labelled()) for name, ahead in batches}


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """Of these layers in a model of ``config``."""
    return getattr(config.get_text_config(), FIELD, 0) or 0


def append_mtp_layers(model: PreTrainedModel) -> None:
    """Gives ``model``, on the meta device, the layers that its configuration asks for, each like its last.

    Raises:
        ConfigError: layers of its family were not compared.
    """
    count, kind = num_mtp_layers(model.config), model.config.model_type
    if not count:
        return
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.mtp.num_layers: is {count}, but {kind} is not among the families with layers for further "
            f"tokens: {', '.join(FAMILIES)}; use 0."
        )
    base = model.base_model
    first, hidden = len(base.layers), model.config.hidden_size
    for index in range(first, first + count):
        layer = copy.deepcopy(base.layers[first - 1])
        layer.self_attn.layer_idx = index
        layer.enorm, layer.hnorm = copy.deepcopy(base.norm), copy.deepcopy(base.norm)
        layer.eh_proj = MetaLinear(2 * hidden, hidden)
        layer.shared_head = nn.Module()
        layer.shared_head.norm = copy.deepcopy(base.norm)
        base.layers.append(layer)


def mtp_layers(model: PreTrainedModel) -> list[Any]:
    """By depth."""
    count = num_mtp_layers(model.config)
    base = model.base_model
    return list(base.layers[-count:]) if count else []


def mtp_parameter_names(names: Iterable[str], config: PreTrainedConfig) -> set[str]:
    """Those of ``names`` (parameters) that lie in these layers."""
    first = config.get_text_config().num_hidden_layers
    prefixes = tuple(f"model.layers.{first + depth}." for depth in range(num_mtp_layers(config)))
    return {name for name in names if prefixes and name.startswith(prefixes)}
