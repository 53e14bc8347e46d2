"""Widths of the activations of a model's blocks on an FSDP2 rank."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from components.adapters import LoRA
from components.adapters.lora_config import MAGNITUDE, A
from components.engines.fsdp2.layout import FSDP2Layout
from components.engines.fsdp2.parallelize import block_prefixes
from components.engines.shared.ulysses import head_repeats
from components.models.attention_shape import attention_shape
from components.models.mtp import num_mtp_layers
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    RunShape,
    mask_bytes,
)
from components.preflight.estimates.model_shape import (
    dense_mlp,
    dropout_bytes,
    has_layer_norms,
    latent_widths,
    moe_block_numbers,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.moe_activations import fsdp2_moe
from components.preflight.estimates.quantities import MicrobatchShape

NORM_GRADIENTS = 5
"""Number of fp32 tensors that exist at the same time in the backward pass of a norm of transformers:
gradients of its squares, of their mean and of its products."""


def block_activations(
    model: PreTrainedModel,
    layout: FSDP2Layout,
    run: RunShape,
    workload: MicrobatchShape,
    adapter: LoRA | None,
) -> tuple[BlockActivations, ...]:
    """Return the activation widths of each block, in order.

    All MoE blocks have the same widths, and so have all dense blocks, except for what DoRA saves. Blocks from
    number ``recompute_num_layers`` on are not recomputed.
    """
    plain = dense_block(model, layout, run, workload, has_adapter=adapter is not None)
    other, routed = plain, moe_block_numbers(model)
    if routed:
        mlp = fsdp2_moe(model, run, tp=layout.tp, ep=layout.ep)
        other = replace(plain, mlp=mlp, kind="moe")
    if adapter is not None and adapter.dora:
        plain, other = (replace(kind, dora_products=dora_products(model, adapter)) for kind in (plain, other))
    prefixes = block_prefixes(model)
    widths, dropped = dora_widths(model, adapter, prefixes), dropout_bytes(model, adapter, run, prefixes)
    mlps = [f"{prefix}mlp." for prefix in prefixes]
    of_mlps = zip(dora_widths(model, adapter, mlps), dropout_bytes(model, adapter, run, mlps), strict=True)
    blocks = [
        replace(
            other if n in routed else plain,
            dora=widths[n],
            dropout=dropped[n],
            mlp_adapter_bytes=width * run.size + num_bytes,
        )
        for n, (width, num_bytes) in enumerate(of_mlps)
    ]
    main = len(blocks) - num_mtp_layers(model.config)
    blocks = [replace(block, is_mtp=number >= main) for number, block in enumerate(blocks)]
    first = len(blocks) if layout.recompute_num_layers is None else layout.recompute_num_layers
    return (*blocks[:first], *(block.not_recomputed() for block in blocks[first:]))


def dense_block(
    model: PreTrainedModel,
    layout: FSDP2Layout,
    run: RunShape,
    workload: MicrobatchShape,
    *,
    has_adapter: bool,
) -> BlockActivations:
    """Return the activation widths of a dense block without those of its adapter."""
    config, of = model.config.get_text_config(), attention_shape(model.config)
    number, groups = of.number // layout.tp, of.shared // layout.tp
    query, key, value = number * of.key, groups * of.key, groups * of.value
    repeats = head_repeats(groups, layout.cp)
    both = number * (of.key + of.value) if run.repeats_heads else (key + value) * repeats
    attended, padded = query + both, 0
    if of.latent:
        attended, padded = latent_widths(config, run, number, copies_values=False)
    whole = run.tiled_norms or has_layer_norms(model)
    return BlockActivations(
        run,
        hidden=config.hidden_size,
        norms=norms_of_hidden(model),
        norm_input=run.size if whole else FP32,
        norm_product=0 if whole or has_adapter else run.size,
        norm_gradients=2 * run.size if whole else NORM_GRADIENTS * FP32,
        normed_heads=query + key if norms_heads(model) else 0,
        attended=attended,
        result=number * of.value,
        copied=padded if run.computes_rows_at_once else number * of.value,
        heads=number,
        mlp=dense_mlp(model, layout.tp),
        latent=of.latent,
        masks=(workload.rows if run.packed else 1) * mask_bytes(workload, run, config),
    )


def dora_products(model: PreTrainedModel, adapter: LoRA) -> int:
    """Return the elements of all matrices from which peft computes the norms of one weight.

    The matrices are the identity, the adapter's output for it, this output scaled, and its sum with the
    weight. The result is the maximum over the weights.
    """
    shapes = adapter.shapes(model)
    sizes = (
        (shapes[name.removesuffix(MAGNITUDE) + A][1], shape.numel())
        for name, shape in shapes.items()
        if name.endswith(MAGNITUDE)
    )
    return max(width * (width + 3 * rows) for width, rows in sizes)


def dora_widths(model: PreTrainedModel, adapter: LoRA | None, prefixes: Sequence[str]) -> list[int]:
    """Return the total width of what DoRA saves in each module of ``prefixes``.

    The gradient of a norm needs two results: that of its matrix, and that of the adapter of the matrix.
    """
    if adapter is None or not adapter.dora:
        return [0] * len(prefixes)
    norms = [
        (name, shape.numel()) for name, shape in adapter.shapes(model).items() if name.endswith(MAGNITUDE)
    ]
    return [2 * sum(size for name, size in norms if name.startswith(prefix)) for prefix in prefixes]
