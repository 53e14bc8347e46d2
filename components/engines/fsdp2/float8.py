"""Linear layers of decoder blocks whose matrix products are in float8 (``run.dtype=fp8``), by torchao.

The operands of each product are scaled and rounded: activations and weights to e4m3, gradients of
activations to e5m2 (``tensorwise``) or e4m3. Master weights, attention, norms, the embedding, the head,
experts and adapters are as with ``run.dtype=bf16``.
"""

import re
from dataclasses import replace
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from components.adapters import LoRA
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.fsdp2.grouped_experts import grouped_experts
from components.engines.fsdp2.layout import FSDP2Layout
from components.models.experts import EXPERT_PARAM
from components.models.hf_private import block_names

MULTIPLE = 16
"""Number of which the rows and columns of a matrix in a float8 product must be multiples."""


def check(model: PreTrainedModel, layout: FSDP2Layout, adapter: LoRA | None, shards: int) -> None:
    """Check that linear layers of ``model`` can compute in float8, with weights on ``shards`` ranks.

    Raises:
        ConfigError: if torchao is missing; if ``layout`` has tensor parallelism; if ``adapter`` quantises or
            is DoRA; if no linear layer has fitting sizes; or if ``fp8_all_gather`` is set with another recipe
            than ``tensorwise``, with ``cpu_offload``, or with ``shards`` that do not divide all rows.
    """
    fitting, gathers = float8_linears(model).values(), layout.fp8_all_gather
    installed = find_spec("torchao") is not None
    uneven = [linear.out_features for linear in fitting if linear.out_features % shards]
    refusals = {
        "run.dtype: fp8 needs torchao, which is not installed; pip install torchao.": not installed,
        "parallelism.tp: run.dtype=fp8 has scales of whole matrices, of which a rank has a part; use "
        "parallelism.tp=1, or run.dtype=bf16.": layout.tp > 1,
        "adapter.quantize: matrices in 4 bits do not compute in float8; use adapter=lora, or "
        "run.dtype=bf16.": adapter is not None and adapter.quantize is not None,
        "adapter.dora: reads weights besides the products in float8; use adapter=lora, or "
        "run.dtype=bf16.": adapter is not None and adapter.dora,
        f"run.dtype: fp8 needs linear layers in blocks whose sizes are multiples of {MULTIPLE}, and this "
        "model has none; use bf16.": not fitting,
        "parallelism.fp8_all_gather: needs one scale for a weight; use parallelism.fp8_recipe=tensorwise, or "
        "leave it out.": gathers and layout.fp8_recipe != "tensorwise",
        "parallelism.fp8_all_gather: is not supported with parallelism.cpu_offload=true; leave one "
        "out.": gathers and layout.cpu_offload,
        f"parallelism.fp8_all_gather: {shards} ranks (dp / dp_replicate x cp) cannot share the "
        f"{min(uneven, default=0)} rows of a matrix evenly; leave it out.": gathers and bool(uneven),
    }
    if said := next((text for text, holds in refusals.items() if holds), None):
        raise ConfigError(said)


def block_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers in decoder blocks by name, except experts and the matrices of an adapter."""
    found, kinds, block = {}, block_names(model), "no block yet"
    for name, module in model.named_modules():
        if type(module).__name__ in kinds:
            block = f"{name}."
        other = ".lora_" in name or EXPERT_PARAM.match(name)
        if isinstance(module, nn.Linear) and name.startswith(block) and not other:
            found[name] = module
    return found


def float8_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the layers of ``block_linears`` whose sizes are multiples of ``MULTIPLE``."""
    found = block_linears(model).items()
    return {name: one for name, one in found if not any(size % MULTIPLE for size in one.weight.shape)}


def convert(model: PreTrainedModel, layout: FSDP2Layout, device: str) -> Json:
    """Convert linear layers of ``model`` (on the meta device) to torchao's, before ``fully_shard``.

    Their parameters and names stay. On a CPU, float8 is emulated: the rounded values are multiplied in fp32.

    Returns:
        A description, which includes the linear layers and experts that stay in bf16, with ``*`` for the
        number of the block.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # here, because it is optional

    config = replace(
        Float8LinearConfig.from_recipe_name(layout.fp8_recipe),
        enable_fsdp_float8_all_gather=layout.fp8_all_gather,
        emulate=device == "cpu",
        pad_inner_dim=True,  # a micro-batch has any number of tokens
    )
    converted = float8_linears(model)
    left = [*(block_linears(model).keys() - converted.keys()), *grouped_experts(model)]
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in converted)
    return {
        "recipe": layout.fp8_recipe,
        "all_gather": layout.fp8_all_gather,
        "emulated": config.emulate,
        "layers": len(converted),
        "in_bf16": sorted({re.sub(r"\.\d+\.", ".*.", name) for name in left}),
    }


def update_scales(model: nn.Module) -> None:
    """Compute the scales of all sharded weights with one all-reduce; collective.

    Without this call, each all-gather of a weight would include an all-reduce of its own. The call is
    necessary after each change of weights.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
