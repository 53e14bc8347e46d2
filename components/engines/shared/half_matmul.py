"""Matrix products in bf16 and fp16 that a CPU computes faster in fp32.

Without instructions for them, torch computes such a product with scalar code, many times as slowly as in fp32
(pytorch issue 146508). This module makes torch convert the factors to fp32, multiply these, and round the
result. These are the numbers that the instructions would give, which also add in fp32, except for the order
of the additions. With such instructions, only the backward pass of attention over short sequences is faster
in fp32.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from components.contracts.device import DeviceKind
from components.engines.shared.torch_private import has_fast_product

HALF = (torch.bfloat16, torch.float16)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operators of aten, each with a second form ``.out``, which compiled code calls."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu_backward"
"""Another operator of aten that multiplies matrices. Its forward is fast in half precision."""
SHORT_SEQUENCE = 384 * 64
"""Maximum of keys times head dimension up to which ``ATTENTION`` is computed in fp32, also on a CPU with such
instructions. In half precision, torch's kernel computes blocks of 512 keys even for a shorter sequence: on a
Xeon with AMX, forward and backward of 6 heads and 128 tokens took 3.6 ms in bf16, and 1.5 ms with the
backward pass in fp32."""


def needs_fp32_products(device: DeviceKind, dtype: torch.dtype) -> bool:
    """Return whether products in ``dtype`` are computed in fp32: on a CPU without instructions for them."""
    return device == "cpu" and dtype in HALF and not has_fast_product(dtype)


def avoid_slow_products(device: DeviceKind, dtype: torch.dtype) -> None:
    """Compute products in fp32 in this process from now on, as far as ``device`` and ``dtype`` need it."""
    if needs_fp32_products(device, dtype):
        install_fp32_attention.cache_clear()  # the same kernel is replaced
        install_fp32_products()
    elif device == "cpu" and dtype in HALF and not install_fp32_products.cache_info().currsize:
        install_fp32_attention()


@cache
def install_fp32_products() -> Library:
    """Compute the products of this process that have factors in half precision in fp32, on the CPU.

    This lasts until the cache of this function is cleared. Other products are computed as before.
    """
    results = dict.fromkeys((*PRODUCTS, ATTENTION), call_in_fp32)
    return replace_kernels(results | {f"{name}.out": call_out_in_fp32 for name in PRODUCTS})


@cache
def install_fp32_attention() -> Library:
    """Compute the backward pass of attention over a ``SHORT_SEQUENCE`` in fp32, on the CPU.

    This lasts until the cache of this function is cleared.
    """
    return replace_kernels({ATTENTION: attention_in_fp32_if_short})


class TorchKernel(Protocol):
    """A kernel of an aten operator, as ``torch.library.get_kernel`` returns it."""

    def call_boxed(self, keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> Any: ...


def replace_kernels(functions: Mapping[str, Callable[..., object]]) -> Library:
    """Replace the CPU kernels of the aten operators that are the keys of ``functions`` by its values.

    A function gets torch's own kernel and the dispatch keys, then the arguments of the operator. The
    replacement lasts as long as the returned ``Library`` exists.
    """
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, function in functions.items():
            kernel = get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(function, kernel), "CPU", with_keyset=True)
    return library


def attention_in_fp32_if_short(
    kernel: TorchKernel,
    keys: torch.DispatchKeySet,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    *args: object,
    **kwargs: object,
) -> object:
    """Call ``kernel``, that of ``ATTENTION``, in fp32 for a short sequence of keys ``[B, heads, T, D]``."""
    is_short = key.shape[2] * key.shape[3] <= SHORT_SEQUENCE
    call = partial(call_in_fp32, kernel) if is_short else kernel.call_boxed
    return call(keys, gradient, query, key, *args, **kwargs)


def call_in_fp32(
    kernel: TorchKernel, keys: torch.DispatchKeySet, first: Tensor, *others: object, **kwargs: object
) -> object:
    """Call ``kernel``, in fp32 if the first argument is in half precision; return its results."""
    if first.dtype not in HALF:
        return kernel.call_boxed(keys, first, *others, **kwargs)
    results, dtype = kernel.call_boxed(keys, *map(to_fp32, (first, *others)), **kwargs), first.dtype
    return results.to(dtype) if isinstance(results, Tensor) else tuple(each.to(dtype) for each in results)


def call_out_in_fp32(
    kernel: TorchKernel, keys: torch.DispatchKeySet, *args: object, out: Tensor, **kwargs: object
) -> Tensor:
    """Call ``kernel``, in fp32 if ``out`` is in half precision; write its result into ``out``."""
    if out.dtype not in HALF:
        return kernel.call_boxed(keys, *args, out=out, **kwargs)
    wide = torch.empty_like(out, dtype=torch.float32)
    result = kernel.call_boxed(keys, *map(to_fp32, args), out=wide, **kwargs)
    return out.resize_(result.shape).copy_(result)


def to_fp32(argument: object) -> object:
    return argument.float() if isinstance(argument, Tensor) else argument
