"""The installation of transformer-engine, examined without importing it."""

import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch


def has_transformer_engine() -> bool:
    """Return whether transformer-engine is installed with its library for torch.

    Without that library, for example with only the one for JAX, Megatron cannot use it. The folders are those
    in which transformer-engine itself looks, for editable installations, source installations and wheels.
    """
    package = find_spec("transformer_engine")
    if package is None or package.origin is None:
        return False
    roots = (Path(package.origin).parents[1], Path(sysconfig.get_path("purelib")))
    places = ("", "transformer_engine/", "transformer_engine/wheel_lib/")
    return any(any(root.glob(f"{place}transformer_engine_torch*.so")) for root in roots for place in places)


def has_packed_kernel() -> bool:
    """Return whether transformer-engine has a memory-efficient kernel for packed rows on this GPU.

    Such a kernel does not store all attention scores. transformer-engine's own fused attention is such a
    kernel from compute capability 9.0 (Hopper) on. flash-attn is such a kernel on earlier GPUs, too.
    """
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return on_hopper or find_spec("flash_attn") is not None
