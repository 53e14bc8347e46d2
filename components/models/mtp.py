"""Multi-token prediction (MTP): layers after the last one, each of which predicts one token further ahead.

The layers follow DeepSeek-V3 (section 2.2), and Megatron-Core in details that its paper leaves open. With
``h_0`` the output of the last norm, the layer of depth k = 1, 2, ... computes at position t
    ``h_k = norm_k(block_k(eh_proj_k([enorm_k(embed(x[t + k])), hnorm_k(h_{k-1})])))``
and the logits of token t + 1 + k are ``head(h_k)``. Embedding and head are those of the model.

The model that ``ModelSpec`` builds has the MTP layers under the names of DeepSeek's files, as layers past
``num_hidden_layers``, which transformers leaves out of its forward pass: ``model.layers.{N + k - 1}.`` with
``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm`` in addition to the parts of a decoder layer.
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
"""Configuration field with the number of MTP layers: DeepSeek's name, which we use for every family."""

FAMILIES = ("deepseek_v3", "gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Families for which MTP layers are supported: they were compared with the layers of transformers."""

JOINS = ("enorm", "hnorm", "eh_proj", "shared_head")
"""Submodules of an MTP layer that a decoder layer does not have."""


@dataclass(frozen=True)
class MTPConfig:
    """Loss terms of multi-token prediction: one per depth, each a mean over its own labels."""

    num_layers: int = 0
    loss_coef: float = 0.3
    """Coefficient of the mean of the loss terms of all depths."""

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
        """Coefficient of the loss of one depth."""
        return self.loss_coef / max(self.num_layers, 1)

    def batches(self, batch: Batch) -> tuple[Batch, ...]:
        """Return the micro-batch for the layer of each depth: ``batch`` shifted left by that depth."""
        return tuple(batch.shifted(depth) for depth in range(1, self.num_layers + 1))

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the number of labels of each term: at depth k, the positions with a label k tokens ahead."""
        batches = zip(self.loss_names, self.batches(batch), strict=True)
        return {name: len(ahead.labelled()) for name, ahead in batches}


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """Return the number of MTP layers of a model with ``config``."""
    return getattr(config.get_text_config(), FIELD, 0) or 0


def append_mtp_layers(model: PreTrainedModel) -> None:
    """Append the MTP layers of its configuration to ``model``, which is on the meta device.

    They are copies of its last decoder layer, with the submodules ``JOINS`` in addition.

    Raises:
        ConfigError: if the model's family is not in ``FAMILIES``.
    """
    count, kind = num_mtp_layers(model.config), model.config.model_type
    if not count:
        return
    if kind not in FAMILIES:
        raise ConfigError(
            f"model.mtp.num_layers: is {count}, but {kind} is not among the families with MTP "
            f"layers: {', '.join(FAMILIES)}; use 0."
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
    """Return the MTP layers of ``model`` in the order of their depths."""
    count = num_mtp_layers(model.config)
    base = model.base_model
    return list(base.layers[-count:]) if count else []


def mtp_parameter_names(names: Iterable[str], config: PreTrainedConfig) -> set[str]:
    """Return those of the parameter ``names`` that belong to MTP layers."""
    first = config.get_text_config().num_hidden_layers
    prefixes = tuple(f"model.layers.{first + depth}." for depth in range(num_mtp_layers(config)))
    return {name for name in names if prefixes and name.startswith(prefixes)}
