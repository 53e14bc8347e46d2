"""FLOPs by kind of operator, and the number of kernels that the host launches."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from components.rehearsal.host_values import Arguments, HostValues

aten = torch.ops.aten

PRODUCTS = {
    packet: flop_registry[packet] for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm)
}
"""Matrix products -> torch's formula of their FLOPs."""
NO_KERNEL = (
    *("prim::", "aten::empty", "aten::detach", "aten::_local_scalar_dense", "aten::_reshape_alias"),
    *("aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::is_pinned"),
)
"""Beginnings of names of operators that launch no kernel, besides views."""


@dataclass
class Arithmetic:
    """Numbers of FLOPs and kernels by moment, that is by part of the rehearsal.

    As in the MFU, only the causal pairs of attention in its window count, and its backward pass counts as two
    forward passes.
    """

    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    """FLOPs by moment and kind: ``matmul``, ``grouped matmul`` or ``attention``."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Number of operators that launch a kernel, by moment."""
    moment: str = "build"

    def see(self, func: OpOverload, args: Arguments, out: object, values: HostValues) -> None:
        """Count the call ``out = func(*args)``."""
        packet, name = func._overloadpacket, func._schema.name
        if not func.is_view and not name.startswith(NO_KERNEL):
            self.kernels[self.moment] += 1
        if packet in PRODUCTS:
            tensors = [value for value in args if isinstance(value, Tensor)]  # and not a dtype of the result
            self.flops[self.moment, "matmul"] += PRODUCTS[packet](*tensors, out_val=out)
        elif name == "aten::_grouped_mm":
            left, right = args[:2]
            self.flops[self.moment, "grouped matmul"] += 2 * left.numel() * right.shape[-1]
        elif name.startswith("torch_attn::_varlen_attn"):
            backward = "backward" in name
            query, boundaries = args[1 if backward else 0], args[6 if backward else 3]
            _, heads, width = query.shape
            pairs = causal_pairs(values, boundaries, len(query))
            place = 13 if backward else 9
            for before, _ in args[place : place + 1]:  # of the window; -1 without one
                pairs = pairs if before < 0 else min(pairs, (before + 1) * len(query))
            self.flops[self.moment, "attention"] += int(4 * heads * width * pairs * (2 if backward else 1))
        elif name.startswith("aten::_scaled_dot_product_efficient_attention"):
            backward = "backward" in name
            query, key = args[1:3] if backward else args[:2]
            rows, keys = query.shape[2], key.shape[2]
            pairs = rows * (keys - rows / 2)  # the queries are the last tokens of a sequence
            share = query.numel() // rows  # batch x heads x width
            self.flops[self.moment, "attention"] += int(4 * share * pairs * (2 if backward else 1))


def causal_pairs(values: HostValues, boundaries: Tensor, length: int) -> float:
    """Return half the sum of the squared lengths of all sequences.

    If the boundaries are unknown, the whole row of ``length`` tokens counts as one sequence.
    """
    known = values.known(boundaries)
    return length**2 / 2 if known is None else float(known.diff().double().square().sum()) / 2
