"""Values of small tensors on a fake device: boundaries, positions, counts and chosen experts are real."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map

aten = torch.ops.aten

Arguments = Sequence[Any]
"""The positional arguments of an operator; its schema has their types."""
Keywords = Mapping[str, Any]
"""The keyword arguments of an operator."""

MAX_NUMEL = 2**23
"""Maximum number of elements whose values are followed: the tokens of a micro-batch times the experts."""
MAX_COPIED = 2**20
"""The same for copies of floats, since moments of optimizers are copied too, and their copies take memory."""
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool})
FILLED = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Operators whose result has known values, whatever the values of their first argument."""
FLOATS = frozenset({"zeros_like", "scatter", "mul", "topk", "_to_copy"})
"""Operators whose floating-point values are followed too: with a capacity, Megatron selects the tokens of an
expert by their weights, which a router writes into zeros."""
UNDEFINED = ("empty", "rand")
"""Operators with these words in their name have results without a known value."""


class UnknownValueError(Exception):
    """The values of a fake tensor are not known."""


class HostValues:
    """Values of fake tensors of at most ``MAX_NUMEL`` elements, as real host tensors.

    These are integers and booleans, and the floating-point results of the operators ``FLOATS``.
    """

    def __init__(self) -> None:
        self._stale: set[int] = set()
        """Storages that an operator with unknown results has written to."""
        self.failures: dict[str, str] = {}
        """Operators whose values could not be computed -> the exception."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor``; raise UnknownValueError if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        values: Tensor | None = getattr(tensor, "host_values", None)
        if values is None or tensor.untyped_storage()._cdata in self._stale:
            raise UnknownValueError
        return values

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return the values of ``tensor``, or None if they are not known."""
        try:
            return self.of(tensor)
        except UnknownValueError:
            return None

    def set(self, tensor: Tensor, values: Tensor) -> None:
        """Declare the values of ``tensor``, which must cover its whole storage.

        The values of the storage then no longer count as unknown.
        """
        tensor.host_values = values  # type: ignore[attr-defined]
        self._stale.discard(tensor.untyped_storage()._cdata)

    def forget_storage(self, key: int) -> None:
        self._stale.discard(key)

    def follow(self, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Compute the values of ``out``, the result of ``func``, if those of the arguments are known.

        Otherwise the values of tensors that ``func`` writes to are no longer known. An exception of
        the computation is kept in ``failures``.
        """
        results = [tensor for tensor in tensors_of((out,)) if isinstance(tensor, FakeTensor)]
        try:
            for result, values in self._results(func, args, kwargs, results):
                result.host_values = values  # type: ignore[attr-defined]
        except UnknownValueError:
            self._mark_written(func, args, kwargs)
        except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
            self._mark_written(func, args, kwargs)
            self.failures[str(func)] = f"{type(error).__name__}: {str(error)[:80]}"

    def _results(
        self, func: OpOverload, args: Arguments, kwargs: Keywords, results: Sequence[FakeTensor]
    ) -> list[tuple[FakeTensor, Tensor]]:
        name = func._schema.name.removeprefix("aten::")
        copied = name == "_to_copy" and results[0].dtype not in INTEGERS
        if any(result.numel() > (MAX_COPIED if copied else MAX_NUMEL) for result in results):
            raise UnknownValueError
        if name == "topk" and args[0].dtype not in INTEGERS and self.known(args[0]) is None:
            return [(results[-1], balanced_choices(results[-1], *args))]
        if name not in FLOATS and any(result.dtype not in INTEGERS for result in results):
            raise UnknownValueError
        if name == "zeros_like" and results[0].dtype not in INTEGERS:
            # One element in host memory stands for all: moments of optimizers are made of zeros too.
            return [(results[0], torch.zeros((), dtype=results[0].dtype).expand(results[0].shape))]
        if name in FILLED and results:
            like = torch.empty(args[0].shape, dtype=args[0].dtype)
            return [(results[0], func(like, *args[1:], **on_host(kwargs)))]
        if func is aten.copy_.default and self._fills(args[0], args[1]):
            self.set(args[0], self.of(args[1]).to(args[0].dtype).clone())
            return []
        if any(word in name for word in UNDEFINED):
            raise UnknownValueError
        floats = any(tensor.is_floating_point() for tensor in tensors_of((*args, *kwargs.values())))
        if floats and name not in FLOATS:
            raise UnknownValueError
        if func is aten.scatter.src and self.known(args[3]) is None:
            # The weights of chosen experts are positive.
            args = (*args[:3], torch.ones(args[3].shape, dtype=args[3].dtype))
        found = func(*tree_map(self._argument, list(args)), **on_host(tree_map(self._argument, dict(kwargs))))
        values = [*tensors_of((found,))]
        if func is aten._to_copy.default and values and values[0] is args[0]:
            values = [values[0].clone()]
        return list(zip(results, values, strict=False))

    def _fills(self, target: Tensor, source: Tensor) -> bool:
        """Return whether a copy defines the values of all of ``target``'s storage for the first time."""
        return (
            isinstance(target, FakeTensor)
            and getattr(target, "host_values", None) is None
            and target.shape == source.shape
            and target.storage_offset() == 0
            and target.untyped_storage().nbytes() == target.numel() * target.element_size()
        )

    def _argument(self, value: object) -> object:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return self.of(value) if isinstance(value, Tensor) else value

    def _mark_written(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        if not func._schema.is_mutable:
            return
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            if argument.is_write:
                for tensor in tensors_of((given.get(argument.name),)):
                    if isinstance(tensor, FakeTensor):
                        self._stale.add(tensor.untyped_storage()._cdata)


def balanced_choices(result: Tensor, scores: Tensor, _: int, dim: int = -1, *__: bool) -> Tensor:
    """Return the choices of a balanced router: expert i, i + 1, ... for consecutive choices."""
    rows = result.movedim(dim, -1).shape
    return (torch.arange(rows.numel()) % scores.shape[dim]).view(rows).movedim(-1, dim)


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operator, some of which are in lists or tuples.

    Every operator of a rehearsal needs it, and it takes a quarter of the time of ``tree_leaves``.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def on_host(kwargs: Keywords) -> Keywords:
    """Return keyword arguments of a torch operator with the CPU as the device and without ``pin_memory``."""
    kept = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return kept | ({"device": torch.device("cpu")} if kept.get("device") is not None else {})
