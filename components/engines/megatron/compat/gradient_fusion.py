"""Gradients of weights that are added to the main gradients in their matrix product, without Apex.

Megatron (``gradient_accumulation_fusion``) takes this product from a CUDA extension of Apex, which is built
from source, and which neither a CPU nor a rehearsal can call. torch has the same product.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import Tensor

from components.engines.shared.added_product import add_product

EXTENSION = "fused_weight_gradient_mlp_cuda"


@contextmanager
def replaced() -> Iterator[None]:
    """Let modules that are imported inside the context take the product from here, not from Apex."""
    stand_in = ModuleType(EXTENSION, __doc__)
    stand_in.wgrad_gemm_accum_fp32 = add_gradient  # type: ignore[attr-defined]  # main gradients are in fp32
    installed = sys.modules.get(EXTENSION)
    sys.modules[EXTENSION] = stand_in
    try:
        yield
    finally:
        del sys.modules[EXTENSION]
        if installed is not None:
            sys.modules[EXTENSION] = installed


def add_gradient(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to ``total``, fp32 ``[out, in]``.

    ``inputs`` is ``[N, in]``, and ``gradient``, that of the outputs, ``[N, out]``.
    """
    add_product(total, gradient.t(), inputs)
