"""What the blocks of a model are made of, as estimates of memory ask for it."""

import re
from functools import lru_cache
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from components.models.experts import moe_blocks
from components.preflight.estimates.activation_memory import FP32, MlpActivations, RunShape

LATENT = ("q_a_layernorm", "kv_a_layernorm")
OF_HEADS = ("q_norm", "k_norm")


@lru_cache(maxsize=8)
def norms_of_a_block(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the first block's norms, without its own."""
    leaves = (name.rpartition(".") for name, _ in model.named_modules() if ".layers.0." in name)
    return tuple(leaf for _, _, leaf in leaves if leaf.endswith("norm"))


def norms_of_hidden(model: PreTrainedModel) -> int:
    """How many norms of a block are over the hidden size."""
    return sum(name not in (*LATENT, *OF_HEADS) for name in norms_of_a_block(model))


def norms_heads(model: PreTrainedModel) -> bool:
    """Whether queries and keys have norms of their own."""
    return any(name in OF_HEADS for name in norms_of_a_block(model))


@lru_cache(maxsize=8)
def moe_block_numbers(model: PreTrainedModel) -> frozenset[int]:
    """The numbers of the blocks that have experts."""
    found = (re.search(r"\.(\d+)\.", name) for name in moe_blocks(model))
    return frozenset(int(number[1]) for number in found if number)


def intermediate_size(config: PreTrainedConfig) -> int:
    """Of the MLP, which older models name otherwise, or not: then it is four times the hidden size."""
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    found = (getattr(config, name, None) for name in names)
    return next((size for size in found if isinstance(size, int)), 4 * config.hidden_size)


def moe_activations(
    model: PreTrainedModel, run: RunShape, *, split: int, shared_split: int, share: float = 1.0
) -> MlpActivations:
    """Of a block with experts, where these get an even load: of ``K`` copies of every token

        what they are given, after they have been put in order       H
        gate, its activation, up, and the product of these           4I
        their result, which has the gradient of its weight           H

    and of the router logits and scores, in fp32. Shared experts are an MLP beside them.

    Args:
        split: ranks that split an expert's matrices; ``shared_split``: a shared one's.
        share: of the tokens of the rank, how many it passes on to experts, here or elsewhere.
    """
    config = model.config.get_text_config()
    block: Any = next(iter(moe_blocks(model).values()))
    inner, hidden = block.experts[0].gate_proj.out_features / split, config.hidden_size
    beside = getattr(block, "shared_experts", None)
    own = beside.gate_proj.out_features / shared_split if beside is not None else 0
    copies, router = share * config.num_experts_per_tok, 2 * len(block.experts) * FP32 / run.size
    return MlpActivations(
        kept=copies * (2 * hidden + 4 * inner) + 4 * own + router,
        gradients=max(copies * (hidden + 2 * inner), 2 * own),
        products=copies * (2 * hidden + 3 * inner) + router,
    )
