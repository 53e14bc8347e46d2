"""The MoE layers of a model, and the checks of a layout against them, without importing megatron."""

import math
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedConfig, PreTrainedModel

from components.contracts.errors import ConfigError
from components.engines.megatron.layout import Layout
from components.engines.shared.parallel_dims import divisors, suggest_sizes

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
"""Model types whose MoE layers are supported."""

KEYS = (
    "ep",
    "etp",
    "moe_token_dispatcher",
    "moe_grouped_gemm",
    "capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_to_capacity",
    "moe_permute_fusion",
    "shared_expert_overlap",
)
"""Keys of a layout that apply only to models with experts."""


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of one model, under names that do not depend on its family."""

    layers: tuple[bool, ...]
    """For each layer of the model, whether it is an MoE layer."""
    number: int
    top_k: int
    intermediate: int
    score: Literal["softmax", "sigmoid"]
    """The function that turns router logits into expert scores."""
    normalized: bool
    """Whether the scores of a token's chosen experts are normalised to sum to 1."""
    scaling: float = 1.0
    """Factor by which the scores of the chosen experts are multiplied, after any normalisation."""
    groups: int = 1
    """Number of expert groups.

    A token's experts come from the ``kept_groups`` groups with the largest sums of their two best scores.
    """
    kept_groups: int = 1
    shared: int = 0
    """Intermediate size of the shared experts, which process every token; 0 means that there are none."""
    biased: bool = False
    """Whether a bias is added to the scores when the experts are chosen."""
    fp32: bool = False
    """Whether router logits are computed in fp32 regardless of the model's dtype."""


def read_moe_config(hf: PreTrainedConfig) -> MoEConfig | None:
    """Return the MoE layers as transformers builds them from ``hf``, or None if every layer is dense."""
    found = moe_layer_numbers(hf) if hf.model_type in FAMILIES else None
    return found if found is not None and any(found.layers) else None


def moe_layer_numbers(hf: PreTrainedConfig) -> MoEConfig:
    layers = range(hf.num_hidden_layers)
    if hf.model_type == "mixtral":
        every = (True,) * hf.num_hidden_layers
        sizes = hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size
        return MoEConfig(every, *sizes, score="softmax", normalized=True)
    sizes = hf.num_local_experts, hf.num_experts_per_tok, hf.moe_intermediate_size
    if hf.model_type == "qwen3_moe":
        step = hf.decoder_sparse_step
        routed = tuple(n not in hf.mlp_only_layers and (n + 1) % step == 0 for n in layers)
        return MoEConfig(routed, *sizes, score="softmax", normalized=hf.norm_topk_prob)
    return MoEConfig(
        tuple(n >= hf.first_k_dense_replace for n in layers),
        *sizes,
        score="sigmoid",
        normalized=hf.norm_topk_prob,
        scaling=hf.routed_scaling_factor,
        groups=hf.n_group,
        kept_groups=hf.topk_group,
        shared=hf.n_shared_experts * hf.moe_intermediate_size,
        biased=True,
        fp32=True,
    )


def check_moe(layout: Layout, model: PreTrainedModel, world_size: int) -> None:
    """Check the MoE keys of the layout against the model.

    Raises:
        ConfigError: if a key is set that does not apply to the model, or does not fit the model's sizes.
    """
    experts, kind = read_moe_config(model.config), model.config.model_type
    if experts is None:
        for key in KEYS:
            if (value := getattr(layout, key)) != getattr(Layout, key):
                raise ConfigError(
                    f"parallelism.{key}: is {value!r}, but {kind} has no experts; leave it out."
                )
        return
    check_moe_sizes(layout, experts, world_size)
    check_routing(layout, model.config, experts)


def check_moe_sizes(layout: Layout, experts: MoEConfig, world_size: int) -> None:
    ranks = world_size // layout.pp
    for key, size, count, what in (
        ("ep", layout.ep, experts.number, "the experts"),
        ("etp", layout.etp, experts.intermediate, "the intermediate size of an expert"),
    ):
        if count % size:
            fitting = [n for n in divisors(count) if ranks % n == 0]
            raise ConfigError(
                f"parallelism.{key}: {size} does not divide {what} of this model, {count}; "
                f"use {suggest_sizes(size, fitting)}."
            )
    if ranks % (layout.ep * layout.etp):
        fitting = [n for n in divisors(experts.number) if ranks % (n * layout.etp) == 0]
        remedy = (
            f"use parallelism.ep={suggest_sizes(layout.ep, fitting)}" if fitting else "use parallelism.etp=1"
        )
        raise ConfigError(
            f"parallelism.ep: ep x etp = {layout.ep} x {layout.etp} does not divide the {ranks} ranks of a "
            f"pipeline stage (tp x cp x dp); {remedy}."
        )
    if experts.shared % layout.tp:
        raise ConfigError(
            f"parallelism.tp: {layout.tp} does not divide {experts.shared}, the intermediate size of the "
            f"shared experts; use {suggest_sizes(layout.tp, divisors(experts.shared))}."
        )


def check_routing(layout: Layout, hf: PreTrainedConfig, experts: MoEConfig) -> None:
    if layout.tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            "parallelism.sequence_parallel: is false, but every tp rank would then route all tokens; "
            "set parallelism.sequence_parallel=true for a model with experts."
        )
    if layout.shared_expert_overlap and not experts.shared:
        raise ConfigError(
            f"parallelism.shared_expert_overlap: {hf.model_type} has no shared experts; leave it out."
        )
    most = experts.number / experts.top_k
    factor = layout.capacity_factor
    if layout.moe_pad_to_capacity and factor is not None and factor > most:
        raise ConfigError(
            f"parallelism.capacity_factor: with {factor:g} an expert has room for more tokens "
            "than there are, which moe_pad_to_capacity cannot fill; use at most "
            f"{math.floor(most * 100) / 100:g}, or parallelism.moe_pad_to_capacity=false."
        )
