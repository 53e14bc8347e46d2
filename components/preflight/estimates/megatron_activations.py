"""Widths of the activations of a model's layers on a Megatron rank."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from components.adapters import LoRA
from components.engines.megatron.layout import Layout
from components.models import mtp
from components.models.attention_shape import attention_shape
from components.preflight.estimates.activation_memory import (
    FP32,
    BlockActivations,
    RunShape,
    mask_bytes,
    mlp_activations,
)
from components.preflight.estimates.model_shape import (
    dropout_bytes,
    latent_widths,
    moe_block_numbers,
    norms_heads,
    norms_of_hidden,
)
from components.preflight.estimates.moe_activations import megatron_moe
from components.preflight.estimates.quantities import MicrobatchShape


def block_activations(
    model: PreTrainedModel, layout: Layout, run: RunShape, workload: MicrobatchShape, adapter: LoRA | None
) -> list[BlockActivations]:
    """Return the activation widths of Megatron's layers with this project's attention, in order.

    Every layer saves its own cosines and sines for queries and for keys. The MLP adds an offset of 0 to up
    and saves the sum too; if it is fused, it saves gate, up and the product. Norms are torch's: separate
    fp32 operators on a CPU, and on a GPU one kernel, which saves its input.
    """
    config, of, tp = model.config, attention_shape(model.config), layout.tp
    number = of.number // tp
    query, key, value = number * of.key, of.shared // tp * of.key, of.shared // tp * of.value
    repeated = number * (of.key + of.value) if run.repeats_heads else None
    normed, rotated, padded = norms_heads(model), of.key, 0
    attends = attended(layout, query, key + value, repeated, normed=normed)
    if of.latent:
        attends, padded = latent_widths(config, run, number, copies_values=True)
        rotated = config.qk_rope_head_dim
    is_kernel = run.device == "cuda"
    kept = 3 if layout.fuses_activation(run.device) else 5
    plain = BlockActivations(
        run,
        hidden=config.hidden_size // (tp if layout.sequence_parallel else 1),
        norms=norms_of_hidden(model),
        norm_input=run.size if is_kernel else FP32,
        norm_product=0 if is_kernel or adapter is not None else FP32,
        normed_heads=query + key if normed else 0,
        attended=attends + 4 * rotated,
        result=number * of.value,
        copied=padded if run.has_kernel else number * of.value,
        heads=number,
        mlp=mlp_activations(config.intermediate_size // tp, kept),
        latent=of.latent,
        masks=(workload.rows if run.packed else 1) * masks_of_a_row(layout, workload, run, config),
    )
    other, routed = plain, moe_block_numbers(model)
    if routed:
        mlp = megatron_moe(model, layout, run, grouped=layout.groups_experts(model, adapter))
        other = replace(plain, mlp=mlp, kind="moe")
    prefixes = [f"model.layers.{number}." for number in range(len(model.base_model.layers))]
    within = tp if layout.sequence_parallel else 1
    dropped, of_mlps = (
        dropout_bytes(model, adapter, run, names, split=tp, hidden_split=within)
        for names in (prefixes, [f"{prefix}mlp." for prefix in prefixes])
    )
    main = len(prefixes) - mtp.num_mtp_layers(config)
    return [
        replace(
            other if number in routed else plain,
            is_mtp=number >= main,
            dropout=saved,
            mlp_adapter_bytes=of_mlps[number],
        )
        for number, saved in enumerate(dropped)
    ]


def attended(layout: Layout, query: int, both: int, repeated: int | None, *, normed: bool) -> int:
    """Return the width of the tensors that attention saves; ``both`` is that of keys and values together.

    K and V are views of the fused QKV output. Saving V therefore keeps the whole output, and so does the norm
    of the keys (``normed``), which saves its input. Instead of V, attention saves copies of K and V if their
    heads are repeated, to the width ``repeated``, or if cp > 1: all gathered keys and values, or the tensors
    of the all-to-all.
    """
    fused = query + both
    if layout.cp == 1 and repeated is None:
        return query + both // 2 + fused
    copies = (repeated or both) * (layout.cp if layout.cp_comm_type == "all_gather" else 1)
    return query + copies + (fused if normed else 0)


def masks_of_a_row(layout: Layout, shape: MicrobatchShape, run: RunShape, config: PreTrainedConfig) -> int:
    """Return the bytes of the masks of a row.

    If cp ranks gather keys, each rank has two of ``2 cp`` chunks, which attend to ``2 cp + 1`` chunks in all.
    """
    if layout.cp == 1 or layout.cp_comm_type == "a2a" or run.has_kernel:
        return mask_bytes(shape, run, config)
    chunk = -(-shape.length // (2 * layout.cp))
    return chunk * chunk * (2 * layout.cp + 1) * run.size


def stage_blocks(
    blocks: Sequence[BlockActivations], chunks: Sequence[str], layout: Layout
) -> tuple[BlockActivations, ...]:
    """Return ``blocks``, the layers of a stage, recomputed only if they are the first ones of their chunk.

    MTP layers, which follow all others, are recomputed too.
    """
    if (first := layout.recompute_num_layers) is None:
        return tuple(blocks)
    places = [place for chunk in chunks for place in range(chunk.count("t"))]
    again = [place < first for place in places] + [True] * (len(blocks) - len(places))
    return tuple(b if now else b.not_recomputed() for b, now in zip(blocks, again, strict=True))
