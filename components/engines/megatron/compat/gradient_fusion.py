"""Weight gradients that are accumulated into the main gradients by their matmul, without Apex.

Megatron (``gradient_accumulation_fusion``) takes this matmul from a CUDA extension of Apex, which is built
from source, and which neither a CPU nor a rehearsal can call. torch has the same matmul.
"""

from types import SimpleNamespace

from torch import Tensor

from components.engines.megatron.compat.patching import Patch
from components.engines.megatron.compat.patching import install as install_patches
from components.engines.shared.added_product import add_product

LAYERS = "megatron.core.tensor_parallel.layers"


def install() -> None:
    """Let Megatron's linear layers call `add_gradient`, whether Apex is installed or not."""
    available = Patch(
        (f"{LAYERS}._grad_accum_fusion_available",), "The extension is replaced below.", lambda _: True
    )
    install_patches([available])
    from megatron.core.tensor_parallel import layers  # is imported after other patches

    # Main gradients are in fp32.
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_gradient)


def add_gradient(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to ``total``, fp32 ``[out, in]``.

    ``inputs`` is ``[N, in]``, and ``gradient``, that of the outputs, ``[N, out]``.
    """
    add_product(total, gradient.t(), inputs)
