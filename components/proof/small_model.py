"""A small model with the structure of a large one: kinds of layers, experts, and groups of heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from transformers import PreTrainedConfig

from components.contracts.json_types import Json

MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
DENSE_LIST, SPARSE_STEP = "mlp_only_layers", "decoder_sparse_step"


@dataclass(frozen=True)
class Limits:
    """``preflight.shrink``: the largest sizes in a proof. None means the size of the experiment itself."""

    layers: int | None
    """Number of layers, rounded up to a multiple of the pipeline chunks of the layout."""
    hidden: int | None
    vocabulary: int | None
    max_length: int | None


def small_config(config: PreTrainedConfig, limits: Limits, sizes: Mapping[str, int]) -> Json:
    """Return the fields of ``config``, reduced to about ``limits``, such that a layout can split the model.

    ``sizes`` are the numbers of ranks of the layout by dimension, such as ``tp``, and ``vpp``. Dropout is 0,
    because its random streams differ between layouts.
    """
    fields = config.to_dict()
    found: Json = {name: 0.0 for name, value in fields.items() if "drop" in name and isinstance(value, float)}
    found |= layer_fields(fields, config.num_hidden_layers, limits.layers, sizes["pp"] * sizes["vpp"])
    if limits.hidden is not None:
        found |= width_fields(fields, config, limits.hidden, sizes)
    if limits.vocabulary is not None and limits.vocabulary < config.vocab_size:
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
        found |= {"vocab_size": limits.vocabulary} | {name: None for name in tokens if name in fields}
    if "initializer_range" in fields:  # so that attention and its gradients are far from uniform
        found["initializer_range"] = 0.1
    native = config.attribute_map
    return fields | {native.get(name, name): value for name, value in found.items()}


def layer_fields(fields: Json, number: int, limit: int | None, chunks: int) -> Json:
    """Return the configuration fields for the layers that are kept: one of each kind, then the first ones."""
    lists = [name for name, value in fields.items() if isinstance(value, list) and len(value) == number]
    lists = [name for name in lists if name != DENSE_LIST]
    first_dense, window = fields.get("first_k_dense_replace") or 0, fields.get("max_window_layers") or 0
    listed, step = fields.get(DENSE_LIST) or (), fields.get(SPARSE_STEP) or 1
    dense = [i < first_dense or i in listed or (i + 1) % step > 0 for i in range(number)]
    kinds = [(*(str(fields[name][i]) for name in lists), dense[i], i < window) for i in range(number)]
    order = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    wanted = -(-max(len(order), limit or number) // chunks) * chunks
    if wanted >= number:
        return {}
    kept = sorted([*order, *(i for i in range(number) if i not in order)][:wanted])
    found: Json = {"num_hidden_layers": wanted} | {name: [fields[name][i] for i in kept] for name in lists}
    new = {
        "first_k_dense_replace": sum(dense[i] for i in kept),
        "max_window_layers": sum(i < window for i in kept),
        DENSE_LIST: [place for place, i in enumerate(kept) if dense[i]],
        SPARSE_STEP: 1,
    }
    return found | {name: value for name, value in new.items() if name in fields}


def width_fields(fields: Json, config: PreTrainedConfig, hidden: int, sizes: Mapping[str, int]) -> Json:
    """Return the configuration fields for smaller widths.

    The channels of a head stay the same, because the configuration may list rotary frequencies.
    """
    heads, tp, ranks = config.num_attention_heads, sizes["tp"], sizes["tp"] * sizes["cp"]
    shared = getattr(config, "num_key_value_heads", None) or heads
    pairs = [
        (kept, each)
        for kept in range(tp, shared + 1, tp)
        for each in range(min(2, heads // shared), heads // shared + 1)
        if kept * each % ranks == 0 and (shared % ranks > 0 or kept % ranks == 0)
    ]
    kept, each = min(pairs, key=lambda pair: pair[0] * pair[1], default=(shared, heads // shared))
    apart = fields.get("head_dim") or fields.get("v_head_dim")
    width = hidden if apart else kept * each * (config.hidden_size // heads)
    found: Json = {"num_attention_heads": kept * each, "hidden_size": min(width, config.hidden_size)}
    unit = lcm(8, tp, sizes["etp"])
    most = dict.fromkeys(MLP_WIDTHS, -(-2 * hidden // unit) * unit)
    most |= {"num_key_value_heads": kept, "q_lora_rank": hidden, "kv_lora_rank": hidden}
    if (top := getattr(config, "num_experts_per_tok", None)) is not None:
        unit = lcm(sizes["ep"], 2 * (fields.get("n_group") or 1))
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        most |= dict.fromkeys(names, -(-2 * top // unit) * unit)
    return found | {name: min(fields[name], size) for name, size in most.items() if fields.get(name)}
