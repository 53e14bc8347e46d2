"""Rules about the arguments of CUDA kernels that their fake implementations do not check."""

import torch
from torch import Tensor
from torch._ops import OpOverload

from components.rehearsal.call_site import call_site
from components.rehearsal.host_values import Arguments, HostValues

MAX_HEAD_DIM = 256
ALIGNMENT = 16
"""Bytes to which rows of the operands of ``_grouped_mm`` must be aligned."""


class KernelRules:
    """Violations of the rules so far, as sentences."""

    def __init__(self, values: HostValues) -> None:
        self.violations: dict[str, None] = {}
        self._values = values

    def check(self, func: OpOverload, args: Arguments) -> None:
        name = func._schema.name
        if name == "torch_attn::_varlen_attn":
            self._varlen_attention(*args[:7])
        elif name == "aten::_grouped_mm":
            self._grouped_product(args[0], args[1])

    def _require(self, condition: bool, text: str) -> None:
        if not condition:
            self.violations[f"{text}, at {call_site()}"] = None

    def _varlen_attention(
        self, query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
    ) -> None:
        """Check what ``mha_varlen_fwd`` requires (flash-attention, csrc/flash_attn/flash_api.cpp)."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            about, width = f"varlen_attn: {name}", tensor.shape[-1]
            self._require(tensor.device.type == "cuda", f"{about} is on {tensor.device}")
            self._require(tensor.dtype in (torch.bfloat16, torch.float16), f"{about} is {tensor.dtype}")
            self._require(tensor.stride(-1) == 1, f"{about} has the last stride {tensor.stride(-1)}")
            self._require(width % 8 == 0 and width <= MAX_HEAD_DIM, f"{about} has the head width {width}")
            self._require(width == query.shape[-1], f"{about} has another head width than the query")
        self._require(key.shape == value.shape, "varlen_attn: key and value have different shapes")
        self._require(
            query.shape[1] % key.shape[1] == 0, "varlen_attn: query heads are no multiple of key heads"
        )
        for name, boundaries, longest, total in (
            ("cu_seq_q", cu_q, max_q, len(query)),
            ("cu_seq_k", cu_k, max_k, len(key)),
        ):
            about = f"varlen_attn: {name}"
            self._require(boundaries.dtype == torch.int32, f"{about} is {boundaries.dtype}")
            self._require(boundaries.device.type == "cuda", f"{about} is on {boundaries.device}")
            self._require(boundaries.is_contiguous(), f"{about} is not contiguous")
            known = self._values.known(boundaries)
            self._require(known is not None, f"{about} has unknown values")
            if known is not None:
                self._require(int(known[-1]) == total, f"{about} ends at {int(known[-1])} of {total}")
                most = int(known.diff().max())
                self._require(most <= longest, f"{about}: a sequence of {most} with a maximum of {longest}")

    def _grouped_product(self, left: Tensor, right: Tensor) -> None:
        """Check the layouts that ``_grouped_mm`` requires (ATen/native/cuda/GroupedBlas.cpp)."""
        for name, tensor in (("left", left), ("right", right)):
            about, size = f"_grouped_mm: the {name} operand", tensor.element_size()
            self._require(tensor.dtype == torch.bfloat16, f"{about} is {tensor.dtype}")
            inner = [stride for stride in tensor.stride()[-2:] if stride == 1]
            self._require(bool(inner), f"{about} has the strides {tensor.stride()}")
            outer = max(tensor.stride()[-2:])
            self._require(outer * size % ALIGNMENT == 0, f"{about} has rows of {outer * size} bytes")
