"""Communication volume of a step in bytes sent per rank, for both engines.

For a tensor of ``n`` bytes over ``p`` ranks, a ring all-reduce sends ``2 (p - 1) / p * n``, and an
all-gather, a reduce-scatter, a broadcast and a pairwise all-to-all send half of that (Thakur et al., 2005).
"""

from components.engines.shared.ulysses import head_repeats
from components.preflight.estimates.quantities import CommVolume, ModelSize

FP32 = 4


def all_gather_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends to gather, scatter or broadcast ``num_bytes`` in total."""
    return (ranks - 1) / ranks * num_bytes


def all_reduce_bytes(num_bytes: float, ranks: int) -> float:
    return 2 * all_gather_bytes(num_bytes, ranks)


def tp_volume(
    size: ModelSize,
    tp: int,
    num_bytes: float,
    *,
    ends: float,
    sequence_parallel: bool = False,
    repeated: float,
    forward_passes: int,
    whole_mlps: float = 0,
    repeated_mlps: float = 0,
    merges: float = 0,
) -> CommVolume:
    """Return the volume of tensor parallelism (Shoeybi et al., 2019) for hidden states of ``num_bytes``.

    Each block has two all-reduces in every forward pass, with or without gradient, and two in the backward
    pass. Sequence parallelism replaces each all-reduce by an all-gather and a reduce-scatter, which together
    send the same number of bytes (Korthikanti et al., 2022). The embedding has one all-reduce in the forward
    pass, and the head one in the backward pass; with sequence parallelism, the embedding and the head each
    have an all-gather or a reduce-scatter in both passes. A scalar head has only the first all-gather. Each
    MTP layer also has an embedding and a head.

    Args:
        ends: share of the embedding and of the head that a rank holds, 1 without pipelining.
        repeated: mean number of all-gathers or reduce-scatters of a block that the backward pass repeats.
        forward_passes: number of passes without gradient.
        whole_mlps: number of blocks whose MLP is not split, and in which only attention communicates.
        repeated_mlps: number of blocks of which only the MLP, with its all-reduce, is recomputed.
        merges: number of all-gathers or reduce-scatters for the matrix with which an MTP layer begins.
    """
    blocks = size.layers - whole_mlps / 2
    # With a frozen embedding, it and the input of the first block need no gradients.
    each, mtp = 4 if size.all_trained else 2, size.mtp_layers
    if size.scalar_head:
        each -= 1 if sequence_parallel else 2
    calls = blocks * (8 + repeated) + 2 * repeated_mlps + ends * (each + mtp * (each + merges))
    calls += forward_passes * (4 * blocks + 2 * ends)
    return CommVolume("tp", calls * all_gather_bytes(num_bytes, tp), when="exposed")


def ulysses_volume(
    size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int, *, passes: float
) -> CommVolume:
    """Return the volume of Ulysses context parallelism (Jacobs et al., 2023).

    Ulysses exchanges queries, keys, values and outputs in each forward pass, and their gradients in the
    backward pass. Heads of keys and values are repeated if ``cp`` does not divide their number.
    """
    repeats = head_repeats(size.kv_heads // tp, cp)
    width = (2 * size.q_width + 2 * size.kv_width * repeats) / tp
    share = tokens / cp * width * itemsize
    return CommVolume("cp", passes * size.layers * all_gather_bytes(share, cp), when="exposed")


def key_value_volume(
    size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int, *, passes: float
) -> CommVolume:
    """Return the volume of context parallelism that gathers keys and values and scatters their gradients."""
    whole = 2 * tokens * size.kv_width / tp * itemsize
    return CommVolume("cp", passes * size.layers * all_gather_bytes(whole, cp), when="exposed")


def expert_gather_volume(
    size: ModelSize, etp: int, tokens: float, itemsize: int, *, passes: float
) -> CommVolume:
    """Return the volume for gathering the inputs of experts over ``etp`` ranks and scattering their results.

    ``tokens`` is the number of tokens of these ranks together. Results and gradients are summed in fp32.
    """
    copies = tokens * size.top_k * size.hidden * (itemsize + FP32)
    num_bytes = size.num_moe_layers * passes * all_gather_bytes(copies, etp)
    return CommVolume("etp", num_bytes, when="exposed", span=etp)


def token_dispatch_volume(
    size: ModelSize, ep: int, tokens: float, itemsize: int, *, passes: float, span: int
) -> CommVolume:
    """Return the volume of expert parallelism with an even load (Lepikhin et al., 2020, section 3.2).

    In each pass, a copy of each of the ``tokens`` of a rank is sent to each of its experts and back.
    """
    copies = tokens * size.top_k * size.hidden * itemsize
    num_bytes = size.num_moe_layers * 2 * passes * all_gather_bytes(copies, ep)
    return CommVolume("ep", num_bytes, when="exposed", span=span)
