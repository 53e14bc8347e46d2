"""What ranks send each other in a step: the formulas both engines share, in bytes a rank sends.

Rings and pairwise exchanges: of a tensor of ``n`` bytes over ``p`` ranks, an all-reduce sends
``2 (p - 1) / p * n``, a gather, a scatter and an all-to-all half of that (Thakur et al., 2005).
"""

from components.preflight.estimates.quantities import CommVolume, ModelSize

FP32 = 4


def all_gather_bytes(num_bytes: float, ranks: int) -> float:
    """One all-gather of a tensor of ``num_bytes``, or one reduce-scatter."""
    return (ranks - 1) / ranks * num_bytes


def all_reduce_bytes(num_bytes: float, ranks: int) -> float:
    return 2 * all_gather_bytes(num_bytes, ranks)


def tp_volume(size: ModelSize, tp: int, tokens: float, itemsize: int, *, recomputed: str) -> CommVolume:
    """Two all-reduces of every block in the forward pass and two in the backward (Shoeybi et al., 2019), and
    those of the forward pass again where blocks are recomputed.

    Sequence parallelism makes a gather and a scatter of each: as many bytes (Korthikanti et al., 2022).
    """
    passes = 6 if recomputed == "full" else 4
    return CommVolume(
        "tp", size.layers * passes * all_reduce_bytes(tokens * size.hidden * itemsize, tp), when="within"
    )


def ulysses_volume(size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int) -> CommVolume:
    """Context parallelism that trades positions for heads: queries, keys, values and outputs, there in the
    forward pass and back in the backward (Jacobs et al., 2023)."""
    width = (2 * size.q_width + 2 * size.kv_width) / tp
    share = tokens / cp * width * itemsize
    return CommVolume("cp", 2 * size.layers * all_gather_bytes(share, cp), when="within")


def key_value_volume(size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int) -> CommVolume:
    """Context parallelism that gathers keys and values, and scatters their gradients."""
    return CommVolume(
        "cp",
        2 * size.layers * all_gather_bytes(2 * tokens * size.kv_width / tp * itemsize, cp),
        when="within",
    )


def token_dispatch_volume(
    size: ModelSize, ep: int, tokens: float, itemsize: int, *, recomputed: str, span: int
) -> CommVolume:
    """Expert parallelism: tokens to their experts and back, a copy for each, in the forward pass and in the
    backward (Lepikhin et al., 2020, section 3.2), with an even load; ``tokens`` are those that a rank sends.

    The forward pass comes twice where blocks are recomputed.
    """
    passes = 6 if recomputed == "full" else 4
    copies = tokens * size.top_k * size.hidden * itemsize
    return CommVolume(
        "ep", size.num_moe_layers * passes * all_gather_bytes(copies, ep), when="within", span=span
    )
