"""The dispatch mode of a rehearsal: every operator on a fake CUDA tensor passes through it."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from components.engines.shared.torch_private import use_count
from components.rehearsal import traffic
from components.rehearsal.arithmetic import Arithmetic
from components.rehearsal.call_site import call_site
from components.rehearsal.host_values import (
    Arguments,
    HostValues,
    Keywords,
    UnknownValueError,
    tensors_of,
)
from components.rehearsal.host_waits import INDEXING, MASKS, HostWaits
from components.rehearsal.kernel_rules import KernelRules
from components.rehearsal.live_memory import LiveMemory
from components.rehearsal.memory_components import follow
from components.rehearsal.traffic import Traffic

aten = torch.ops.aten

PLAIN = (FakeTensor, Tensor, torch.nn.Parameter)
"""Tensor types whose calls are executed here. Other types, such as DTensor, first replace a call by calls on
their local tensors."""

HELD_BY_AUTOGRAD = 4
"""``use_count`` that a gradient has inside a dispatch mode if only the backward pass holds it."""


class RehearsalMode(TorchDispatchMode):
    """Execute operators on host tensors; on CUDA tensors, compute only shapes, dtypes and devices.

    Attributes record what a GPU would have done. ``moment`` names the part of a step that is running.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = HostValues()
        self.memory, self.waits = LiveMemory(freed=self.values.forget_storage), HostWaits()
        self.traffic, self.arithmetic = Traffic(), Arithmetic()
        self.rules = KernelRules(self.values)
        self.step = "build"
        self._special: dict[str, Callable[[OpOverload, Arguments, Keywords], object]] = {
            "aten::_pin_memory": self._pinned,
            "aten::_local_scalar_dense": lambda _, args, __: self._scalar(args[0]),
            "c10d": self._exchange,
            "_c10d_functional": self._functional_exchange,
        }

    def count_anew(self) -> None:
        """Reset the records of waits, traffic and arithmetic, but not that of memory."""
        self.waits.waits.clear()
        self.waits.copies.clear()
        self.traffic, self.arithmetic = Traffic(), Arithmetic()

    @property
    def moment(self) -> str:
        """``forward`` or ``backward`` if ``step`` is ``microbatches``, otherwise ``step``."""
        if self.step != "microbatches":
            return self.step
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        if func is torch.ops.prim.device.default:  # what most calls are
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        any_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors_of((*args, *kwargs.values())))
        device = kwargs.get("device")
        if device is None:
            device = next((value for value in args if isinstance(value, torch.device)), None)
        target = None if device is None else torch.device(device)
        if func is aten.is_pinned.default:
            return self.waits.pinned.holds(args[0])
        if any_fake or (target is not None and target.type == "cuda"):
            out = self._on_gpu(func, args, kwargs, target)
        else:
            out = func(*args, **kwargs)
        self.waits.pinned.follow(func, args, kwargs, out)
        return out

    def _on_gpu(
        self, func: OpOverload, args: Arguments, kwargs: Keywords, target: torch.device | None
    ) -> object:
        """Return the result of an operator with CUDA tensors, and record what a GPU would have done."""
        moment = self.moment
        self.memory.enter(moment)
        self.waits.moment = self.traffic.moment = self.arithmetic.moment = moment
        special = self._special.get(func._schema.name) or self._special.get(func.namespace)
        return (
            special(func, args, kwargs) if special is not None else self._compute(func, args, kwargs, target)
        )

    def _compute(
        self, func: OpOverload, args: Arguments, kwargs: Keywords, target: torch.device | None
    ) -> object:
        """Record an operator that is none of ``_special``, and return its fake result."""
        if is_accumulation(func, args):
            func = aten.add_.Tensor
        self.waits.see(func, args, kwargs, target)
        self.rules.check(func, args)
        if func._schema.name in INDEXING:
            args = self._without_masks(args)
        out = self._fake_result(func, args, kwargs)
        self.values.follow(func, args, kwargs, out)
        self.arithmetic.see(func, args, out, self.values)
        for tensor in tensors_of((out,)):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                self.memory.hold(tensor)
        follow(self.memory, func, args, out)
        return out

    def _fake_result(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        if func in DATA_DEPENDENT:
            return self._data_dependent(func, args, kwargs)
        if func is aten.addmm.dtype_out:  # for which torch 2.11 has no fake result
            return kwargs["out"]
        lifted_args = [self._lift(value) for value in args]
        lifted_kwargs = {name: self._lift(value) for name, value in kwargs.items()}
        with self.fake:
            return func(*lifted_args, **lifted_kwargs)

    def _pinned(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Tensor:
        with self.fake:
            out = torch.empty_like(args[0])
        self.values.follow(func, args, kwargs, out)
        return out

    def _lift(self, value: object) -> object:
        """Return a fake tensor in place of a host tensor, also in lists, and any other value as it is.

        FakeTensorMode's own conversion would keep the host tensor alive.
        """
        if isinstance(value, list | tuple):
            return [self._lift(item) for item in value]
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        with self.fake:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _scalar(self, tensor: FakeTensor) -> float | int | bool:
        """Return the value of a scalar, or a plausible value if it is unknown."""
        if tensor.fake_device.type == "cuda":
            self.waits.wait("item")
        known = self.values.known(tensor)
        return plausible(tensor.dtype) if known is None else known.item()

    def _without_masks(self, args: Arguments) -> Arguments:
        """Replace masks whose values are known by the positions that they select."""
        found: list[Tensor | None] = []
        for index in args[1]:
            known = None if index is None or index.dtype not in MASKS else self.values.known(index)
            if known is None:
                found.append(index)
                continue
            device = args[0].device if isinstance(args[0], FakeTensor) else index.device
            for positions in known.nonzero().unbind(1):
                with self.fake:
                    made = torch.empty(positions.shape, dtype=torch.int64, device=device)
                self.values.set(made, positions)
                found.append(made)
        return (args[0], found, *args[2:])

    def _data_dependent(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> FakeTensor:
        """Return the result of an operator whose length depends on values.

        If these are unknown, the result has the largest possible length.
        """
        source = args[0]
        if func is aten.masked_select.default:
            shape = torch.broadcast_shapes(source.shape, args[1].shape)
            length = self._count(args[1], lambda mask: mask.expand(shape).sum())
            new: tuple[int, ...] = (length,)
        elif func is aten.nonzero.default:
            new = (self._count(source, lambda values: (values != 0).sum()), source.dim())
        else:
            size = kwargs.get("output_size")
            new = (self._count(source, torch.sum) if size is None else size,)
        dtype = torch.int64 if func is aten.nonzero.default else source.dtype
        with self.fake:
            return torch.empty(new, dtype=dtype, device=source.device)  # type: ignore[return-value]

    def _count(self, tensor: Tensor, count: Callable[[Tensor], Tensor]) -> int:
        try:
            return int(count(self.values.of(tensor)))
        except UnknownValueError:
            return tensor.numel()

    # ---- messages

    def _exchange(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        """Record a collective, and call it on the fake group with empty host tensors for fake tensors."""
        fakes = [t for t in tensors_of((*args, *kwargs.values())) if isinstance(t, FakeTensor)]
        group = traffic.group_of(args)
        name = func._schema.name.removeprefix("c10d::").rstrip("_")
        ranks = [] if group is None else dist.get_process_group_ranks(group)
        self.traffic.add(name, ranks, args)
        stands: dict[int, Tensor] = {}

        def real(value: object) -> object:
            if not isinstance(value, FakeTensor):
                return value
            return stands.setdefault(id(value), torch.empty(0, dtype=value.dtype))

        replaced = [tree_map(real, value) for value in args]
        if name == "alltoall_base":
            replaced[3], replaced[4] = [], []  # the sizes of the real tensors
        out = func(*replaced, **tree_map(real, kwargs))
        traffic.follow_values(self.values, func, fakes, 1 if group is None else group.size())
        back = {id(stands[id(fake)]): fake for fake in fakes}
        return tree_map(lambda value: back.get(id(value), value) if isinstance(value, Tensor) else value, out)

    def _functional_exchange(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        name = func._schema.name.removeprefix("_c10d_functional::")
        words = (value for value in reversed(args) if isinstance(value, str))
        group = next((word for word in words if word not in REDUCTIONS), None)
        if group is None:
            return args[0]  # wait_tensor, whose fake result would be a second tensor in memory
        out = self._compute(func, args, kwargs, None)
        resolved = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
        self.traffic.add(name, dist.get_process_group_ranks(resolved), (*args, out))
        return out


def is_accumulation(func: OpOverload, args: Arguments) -> bool:
    """Return whether autograd adds two gradients of one tensor in a way that is in-place for real tensors.

    The rule for adding in place (torch/csrc/autograd/input_buffer.cpp) excludes subclasses such as fake
    tensors.
    """
    if func is not aten.add.Tensor or torch._C._current_graph_task_id() == -1:
        return False
    first, second = args
    if not isinstance(second, Tensor):
        return False
    same = first.shape == second.shape and first.dtype == second.dtype and first.is_contiguous()
    return same and call_site() == "autograd" and use_count(first) <= HELD_BY_AUTOGRAD


def plausible(dtype: torch.dtype) -> float | int | bool:
    """Return a value for an unknown scalar, False or 1, with which a step counts as finite."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


DATA_DEPENDENT = (aten.masked_select.default, aten.nonzero.default, aten.repeat_interleave.Tensor)
REDUCTIONS = ("sum", "avg", "max", "min", "product")
