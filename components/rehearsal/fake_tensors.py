"""Replacements of torch functions that do not accept fake tensors, for the rest of the process."""

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_impls import register_op_impl
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import _foreach_supported_types

from components.rehearsal.mode import RehearsalMode, plausible

ATEN = torch.library.Library("aten", "IMPL")
"""The library of replaced ATen kernels. They stay replaced as long as this object exists."""
OWN_ATTRIBUTES = frozenset(
    [
        "fake_device",
        "fake_mode",
        "constant",
        "pytype",
        "dispatch_keys",
        "real_tensor",
        "nonzero_memo",
        "item_memo",
        "unique_memo",
        "unique_consecutive_memo",
        "nested_int_memo",
        "host_values",
        "_debug_trace",
    ]
)
"""Attributes that describe a fake tensor. ``swap_tensors`` exchanges them; all other attributes stay with the
parameter."""


def install(mode: RehearsalMode) -> None:
    """Replace the functions; ``mode`` records what they would do on a GPU."""
    replace_reads(mode)
    replace_resize(mode)
    replace_swap()
    replace_tensor()
    pause_shape_propagation(mode)
    # Optimizers update many tensors of a GPU in one call, if they are of these types.
    _foreach_supported_types.append(FakeTensor)
    if not torch.backends.cuda.is_built():
        keep_whole()


def keep_whole() -> None:
    """Keep RMS norms and the backward passes of SiLU and Mish one operator each, as in a build with CUDA.

    A build without CUDA has no CUDA kernels for them and decomposes them into seven or more operators, whose
    results would count as memory. No gradient goes through the backward passes, so autograd has nothing
    to do there.
    """
    for name in ("silu_backward", "mish_backward"):
        ATEN.impl(name, torch.library.fallthrough_kernel, "AutogradCUDA")
    ATEN.impl("_fused_rms_norm", rms_norm, "CUDA")  # with a kernel, autograd has its own backward pass
    register_op_impl(torch.ops.aten._fused_rms_norm.default)(lambda _mode, _func, *args: rms_norm(*args))


def rms_norm(rows: Tensor, shape: Sequence[int], *_: object) -> tuple[Tensor, Tensor]:
    """Return the kernel's outputs: the normalised rows, and the fp32 inverse of each root mean square."""
    outer = rows.shape[: rows.ndim - len(shape)]
    return torch.empty_like(rows), rows.new_empty([*outer, *[1] * len(shape)], dtype=torch.float32)


def replace_reads(mode: RehearsalMode) -> None:
    """Make ``tolist`` and ``numpy`` return the values of a fake tensor.

    If the values are unknown, ``tolist`` returns plausible ones, and ``numpy`` raises UnknownValueError.
    """
    tensor: Any = Tensor
    plain_numpy = Tensor.numpy

    def tolist(self: FakeTensor) -> object:
        if self.fake_device.type == "cuda":
            mode.waits.wait("tolist")
        known = mode.values.known(self)
        return torch.full(self.shape, plausible(self.dtype)).tolist() if known is None else known.tolist()

    def numpy(self: Tensor, *, force: bool = False) -> object:
        return plain_numpy(mode.values.of(self), force=force)

    fake: Any = FakeTensor
    fake.tolist = tolist
    tensor.numpy = numpy
    tensor.record_stream = lambda *_: None


def replace_tensor() -> None:
    """Make ``torch.tensor(..., pin_memory=True)`` call ``Tensor.pin_memory``, which a dispatch mode sees."""
    module: Any = torch
    plain = module.tensor

    def tensor(*args: object, pin_memory: bool = False, **options: object) -> Tensor:
        made: Tensor = plain(*args, **options)
        return made.pin_memory() if pin_memory else made

    module.tensor = tensor


def replace_resize(mode: RehearsalMode) -> None:
    """Make ``resize_`` report the new size of a storage to ``mode``; FSDP frees gathered weights with it."""
    plain = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> object:
        done = plain(self, size)
        mode.memory.resized(self)
        return done

    storage: Any = torch.UntypedStorage
    storage.resize_ = resize


def replace_swap() -> None:
    """Make ``Module.to`` and ``to_empty`` exchange fake parameters, whose ``data`` cannot be assigned."""
    utils: Any = torch.utils
    plain = torch.utils.swap_tensors
    # Weak references that only torch's own caches hold do not forbid an exchange.
    utils.weakref = SimpleNamespace(getweakrefs=lambda _: [], WeakIdKeyDictionary=weakref.WeakKeyDictionary)

    def swap(a: Tensor, b: Tensor) -> None:
        if a is b:
            return
        if (
            isinstance(a, FakeTensor)
            and isinstance(b, FakeTensor)
            and (a.device, a.dtype) == (b.device, b.dtype)
        ):
            return
        kept = {name: value for name, value in vars(a).items() if name not in OWN_ATTRIBUTES}
        plain(a, b)
        vars(a).update(kept)

    utils.swap_tensors = swap
    torch.__future__.set_swap_module_params_on_conversion(True)


def pause_shape_propagation(mode: RehearsalMode) -> None:
    """Exclude from the memory the tensors from which DTensor derives the shape of a result.

    On a GPU they would take no memory.
    """

    def paused(plain: Callable[..., object]) -> Callable[..., object]:
        def propagate(*args: object, **options: object) -> object:
            mode.memory.paused += 1
            try:
                return plain(*args, **options)
            finally:
                mode.memory.paused -= 1

        return propagate

    propagator: Any = ShardingPropagator
    for name in ("_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"):
        setattr(propagator, name, paused(getattr(propagator, name)))
