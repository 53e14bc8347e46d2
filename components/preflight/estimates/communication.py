"""What ranks send each other in a step: the formulas both engines share, in bytes a rank sends.

Rings and pairwise exchanges: of a tensor of ``n`` bytes over ``p`` ranks, an all-reduce sends
``2 (p - 1) / p * n``, a gather, a scatter and an all-to-all half of that (Thakur et al., 2005).
"""

from components.preflight.estimates.quantities import ModelSize, Sent

FP32 = 4


def gathered(num_bytes: float, ranks: int) -> float:
    """One all-gather of a tensor of ``num_bytes``, or one reduce-scatter."""
    return (ranks - 1) / ranks * num_bytes


def all_reduced(num_bytes: float, ranks: int) -> float:
    return 2 * gathered(num_bytes, ranks)


def tensor_parallel(size: ModelSize, tp: int, tokens: float, itemsize: int, *, recomputed: str) -> Sent:
    """Two all-reduces of every block in the forward pass and two in the backward (Shoeybi et al., 2019), and
    those of the forward pass again where blocks are recomputed.

    Sequence parallelism makes a gather and a scatter of each: as many bytes (Korthikanti et al., 2022).
    """
    passes = 6 if recomputed == "full" else 4
    return Sent("tp", size.layers * passes * all_reduced(tokens * size.hidden * itemsize, tp), when="within")


def traded_heads(size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int) -> Sent:
    """Context parallelism that trades positions for heads: queries, keys, values and outputs, there in the
    forward pass and back in the backward (Jacobs et al., 2023)."""
    width = (2 * size.query + 2 * size.key) / tp
    share = tokens / cp * width * itemsize
    return Sent("cp", 2 * size.layers * gathered(share, cp), when="within")


def gathered_keys(size: ModelSize, cp: int, tp: int, tokens: float, itemsize: int) -> Sent:
    """Context parallelism that gathers keys and values, and scatters their gradients."""
    return Sent("cp", 2 * size.layers * gathered(2 * tokens * size.key / tp * itemsize, cp), when="within")


def traded_tokens(
    size: ModelSize, ep: int, tokens: float, itemsize: int, *, recomputed: str, span: int
) -> Sent:
    """Expert parallelism: tokens to their experts and back, a copy for each, in the forward pass and in the
    backward (Lepikhin et al., 2020, section 3.2), with an even load; ``tokens`` are those that a rank sends.

    The forward pass comes twice where blocks are recomputed.
    """
    passes = 6 if recomputed == "full" else 4
    copies = tokens * size.chosen * size.hidden * itemsize
    return Sent("ep", size.routed_layers * passes * gathered(copies, ep), when="within", span=span)
