"""Float8 matrix products of Megatron's layers (``run.dtype=fp8``), which transformer-engine computes.

The operands of each product are scaled and rounded: activations and weights to e4m3, and gradients of
activations to e5m2 (``tensorwise``) or e4m3. The scales are computed from the operands themselves, not from
those of earlier steps (delayed scaling), so checkpoints do not contain them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel

from components.contracts.engine import EngineOptions
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.engines.megatron.checks import uses_transformer_engine, why_no_transformer_engine
from components.engines.megatron.layout import Layout
from components.models.attention_shape import attention_shape

COPIES = 2
"""Copies of a weight in float8 that transformer-engine keeps: for the forward and for the backward pass."""


@dataclass(frozen=True)
class Recipe:
    """The requirements of a recipe of transformer-engine."""

    format: Literal["hybrid", "e4m3"]
    """Megatron's name of the number formats: e5m2 for gradients only, or e4m3 for everything."""
    multiple: int
    """Number of which both sizes of each matrix in a product must be multiples."""
    capability: tuple[int, int]
    """The lowest compute capability of a GPU with such products."""


RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe("hybrid", 16, (8, 9)),
    "blockwise": Recipe("e4m3", 16, (9, 0)),
    "mxfp8": Recipe("e4m3", 32, (10, 0)),
}


def check(layout: Layout, model: PreTrainedModel, options: EngineOptions) -> None:
    """Check that transformer-engine can compute the linear layers of ``model`` in float8.

    Raises:
        ConfigError: if it does not compute this run, or a rank's part of a matrix has an unsuitable size.
    """
    arguments = model.config, layout, options.dtype, options.device, options.adapter
    if (reason := why_no_transformer_engine(*arguments)) is not None:
        raise ConfigError(
            f"run.dtype: fp8 with Megatron is computed by transformer-engine, but {reason}; use "
            "parallelism=fsdp2, or run.dtype=bf16."
        )
    if not uses_transformer_engine(*arguments):
        raise ConfigError(
            f"parallelism.transformer_impl: is {layout.transformer_impl}, which chooses Megatron's own "
            "layers on this machine, and they do not compute in float8; use transformer_engine, or "
            "run.dtype=bf16."
        )
    recipe, name = RECIPES[layout.fp8_recipe], layout.fp8_recipe
    if unsuitable := [size for size in matrix_sizes(layout, model) if size % recipe.multiple]:
        raise ConfigError(
            f"run.dtype: fp8 (parallelism.fp8_recipe={name}) needs matrices whose numbers of rows and "
            f"columns are multiples of {recipe.multiple}, and a rank has one of {unsuitable[0]}; use a "
            "smaller parallelism.tp, or run.dtype=bf16."
        )


def matrix_sizes(layout: Layout, model: PreTrainedModel) -> list[int]:
    """Return the numbers of rows and columns of a rank's matrices in a layer."""
    config, of = model.config, attention_shape(model.config)
    query, fused = of.number * of.key, of.number * of.key + of.shared * (of.key + of.value)
    return [config.hidden_size, *(size // layout.tp for size in (config.intermediate_size, query, fused))]


def config_fields(layout: Layout) -> Json:
    """Return the fields of Megatron's configuration for ``layout.fp8_recipe``."""
    return {"fp8": RECIPES[layout.fp8_recipe].format, "fp8_recipe": layout.fp8_recipe}
