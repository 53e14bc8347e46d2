"""Gradients of weights that are added to the main gradients in their matrix product, without Apex.

Megatron (``gradient_accumulation_fusion``) takes this product from Apex's CUDA extension, which must be built
from source. torch has the same product, so this module stands in for the extension if it is not installed.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

from components.engines.shared.added_product import add_product

EXTENSION = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Let megatron-core import the product from here. Called before megatron is imported."""
    if EXTENSION not in sys.modules and find_spec(EXTENSION) is None:
        stand_in = ModuleType(EXTENSION, __doc__)
        stand_in.wgrad_gemm_accum_fp32 = add_gradient  # type: ignore[attr-defined]
        sys.modules[EXTENSION] = stand_in


def add_gradient(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to ``total``, fp32 ``[out, in]``.

    ``inputs`` is ``[N, in]``, and ``gradient``, that of the outputs, ``[N, out]``.
    """
    add_product(total, gradient.t(), inputs)
