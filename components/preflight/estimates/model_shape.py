"""Shapes of the blocks of a model, for estimates of memory."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from components.adapters import LoRA
from components.adapters.lora_config import A
from components.engines.fsdp2.parallelize import decoder_blocks
from components.models.experts import EXPERT_PARAM, moe_blocks
from components.preflight.estimates.activation_memory import (
    MlpActivations,
    RunShape,
    mlp_activations,
    ungated_mlp,
)

LATENT = ("q_a_layernorm", "kv_a_layernorm")
SAME_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), "attention"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp"),
}
"""Linear layers of a block -> a word that is the same for those with the same input."""
OF_HEADS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
TENSORS_OF_ACTIVATION = {
    **dict.fromkeys(("relu", "sigmoid", "tanh"), (1, 2)),
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish", "mish"), (2, 1)),
    **dict.fromkeys(("relu6", "leaky_relu", "hardswish"), (2, 1)),
    "relu2": (2, 3),
    "quick_gelu": (3, 2),
    "gelu_new": (5, 2),
    "gelu_fast": (8, 2),
}
"""Activation -> the numbers of tensors that an MLP without a gate saves, and that its backward pass adds.

The saved ones are the inputs that the operators of the activation save, and its result, the input of the next
matrix. ``relu`` saves only its result.
"""


def text_block(model: PreTrainedModel) -> nn.Module:
    """Return the first decoder block of the language model, also if the model has an image encoder."""
    return decoder_blocks(model.get_decoder())[0]


def is_layer_norm(module: nn.Module, model: PreTrainedModel) -> bool:
    """Return whether a module is torch's own norm over the hidden size, and not over that of a head."""
    hidden = (model.config.get_text_config().hidden_size,)
    return isinstance(module, nn.LayerNorm) and module.normalized_shape == hidden


def has_layer_norms(model: PreTrainedModel) -> bool:
    """Return whether norms are those of torch, one operator each, which saves its input itself."""
    return any(is_layer_norm(module, model) for module in text_block(model).modules())


@lru_cache(maxsize=8)
def norms_of_a_block(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the norms in the first block, without the names of the modules that hold them."""
    modules = text_block(model).named_modules()
    found = (name for name, module in modules if name.endswith("norm") or is_layer_norm(module, model))
    return tuple(name.rpartition(".")[2] for name in found)


def norms_of_hidden(model: PreTrainedModel) -> int:
    """Return the number of norms of a block over the hidden size."""
    return sum(name not in (*LATENT, *OF_HEADS) for name in norms_of_a_block(model))


def norms_heads(model: PreTrainedModel) -> bool:
    """Return whether queries and keys have norms."""
    return any(name in OF_HEADS for name in norms_of_a_block(model))


def attention_dropout(model: PreTrainedModel) -> float:
    return float(getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0)


def latent_widths(
    config: PreTrainedConfig, run: RunShape, heads: int, *, copies_values: bool
) -> tuple[int, int]:
    """Return the width that latent attention saves as its inputs, and the width that it pads.

    Queries and keys are put together from two parts each. Values are a view of the result of a matrix, which
    is therefore saved, unless the engine ``copies_values``. Values that attention pads are not saved, except
    if attention is recomputed. ``heads`` is the number of heads of the rank.
    """
    text = config.get_text_config()
    key, value = heads * text.qk_head_dim, heads * text.v_head_dim
    pads = run.has_kernel and key > value
    given = value if copies_values else heads * text.qk_nope_head_dim + value
    return 2 * key + (0 if pads and "core_attn" not in run.modules else given), 2 * key * pads


@lru_cache(maxsize=8)
def moe_block_numbers(model: PreTrainedModel) -> frozenset[int]:
    """Return the indices of the MoE blocks, from 0."""
    found = (re.search(r"\.(\d+)\.", name) for name in moe_blocks(model))
    return frozenset(int(number[1]) for number in found if number)


def intermediate_size(config: PreTrainedConfig) -> int:
    """Return the MLP width, under any of its names in older configurations, or else 4 x the hidden size."""
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    found = (getattr(config, name, None) for name in names)
    return next((size for size in found if isinstance(size, int)), 4 * config.hidden_size)


@lru_cache(maxsize=8)
def dense_mlp(model: PreTrainedModel, tp: int) -> MlpActivations:
    """Return the widths of a dense MLP that ``tp`` ranks split. Without a gate, two matrices have its width.

    Where the activation is not known, it counts as two operators that save their inputs: four tensors.
    """
    text = model.config.get_text_config()
    width = intermediate_size(text)
    shapes = [weight.shape for weight in text_block(model).parameters()]
    if sum(width in shape for shape in shapes if len(shape) == 2) != 2:
        return mlp_activations(width // tp)
    activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None)
    return ungated_mlp(width // tp, *TENSORS_OF_ACTIVATION.get(str(activation), (4, 2)))


def dropout_bytes(
    model: PreTrainedModel,
    adapter: LoRA | None,
    run: RunShape,
    prefixes: Sequence[str],
    *,
    split: int = 1,
    hidden_split: int = 1,
) -> list[int]:
    """Return the bytes per token that dropout before the adapters saves in each block of ``prefixes``.

    Every adapter saves a tensor of its own, in place of the input that the other estimates count once for all
    layers that share it. ``split`` is the number of tp ranks that split the inputs of the last matrices of
    attention and MLP, and ``hidden_split`` the number that split all others.
    """
    if adapter is None or not adapter.dropout:
        return [0] * len(prefixes)
    found = Counter[str]()
    shared: dict[tuple[str, str, str], int] = {}
    for name, shape in adapter.shapes(model).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None or not name.endswith(A) or EXPERT_PARAM.match(name):
            continue
        parent, _, leaf = name.removesuffix(A).rpartition(".")
        width = shape[1] // (hidden_split if leaf in SAME_INPUT else split)
        found[prefix] += width * run.size
        shared[prefix, parent, SAME_INPUT.get(leaf, leaf)] = width * run.size
    for (prefix, *_), size in shared.items():
        found[prefix] -= size
    return [found[prefix] for prefix in prefixes]
