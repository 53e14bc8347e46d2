"""The gradient norm is accurate in float64, without a float64 copy of any gradient on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.engines.shared import process_group
from components.engines.shared.loss_accumulator import global_norm


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    process_group.init_process_group("cpu")
    yield
    process_group.destroy_process_group()


class Operators(TorchDispatchMode):
    """Record the operators that read more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        tensors = args[0] if args and isinstance(args[0], list) else args
        if any(isinstance(tensor, Tensor) and tensor.numel() > 100 for tensor in tensors):
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("sizes", [(), (0,), (7,), (500_000, 3, 0, 1000)], ids=str)
def test_the_norm(sizes: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=g) for size in sizes]
    found = global_norm(iter(gradients), dist.group.WORLD, torch.device("cpu"))
    exact = torch.cat([torch.zeros(1), *gradients]).double().square().sum().sqrt()
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(exact.item(), rel=1e-12)


def test_large_tensors_are_read_by_one_operator() -> None:
    with Operators() as operators:
        global_norm([torch.ones(1000), torch.ones(2000)], dist.group.WORLD, torch.device("cpu"))
    assert [name for name in operators.seen if "fill" not in name] == ["aten._foreach_norm.Scalar"]
