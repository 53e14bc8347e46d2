"""The gradient norm is accurate, without a copy of any gradient in float64."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.engines.shared import process_group
from components.engines.shared.loss_accumulator import NORM_BLOCK, global_norm, tensor_norms


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


@pytest.mark.parametrize("sizes", [(), (0,), (7,), (NORM_BLOCK,), (500_000, 3, 0, 1000)], ids=str)
def test_the_norm(sizes: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=g) for size in sizes]
    found = global_norm(iter(gradients), dist.group.WORLD, torch.device("cpu"))
    exact = torch.cat([torch.zeros(1), *gradients]).double().square().sum().sqrt()
    assert found.dtype == torch.float64
    # One float32 sum of the squares of 500,000 elements would be off by 5e-5.
    assert found.item() == pytest.approx(exact.item(), rel=1e-12 if sum(sizes) < NORM_BLOCK else 3e-7)


def test_columns_of_a_matrix_have_the_same_norm_as_a_copy() -> None:
    shard = torch.randn(300, 100)[:, :50]
    assert torch.equal(tensor_norms([shard]), tensor_norms([shard.contiguous()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_no_gradient_is_copied_to_float64(dtype: torch.dtype) -> None:
    wide: list[torch.Size] = []

    class Results(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            if isinstance(result, Tensor) and result.dtype == torch.float64:
                wide.append(result.shape)
            return result

    gradient = torch.randn(100, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    with Results():
        (found,) = tensor_norms([gradient])
    assert max(shape.numel() for shape in wide) <= 300_000 // NORM_BLOCK + 1
    assert found.item() == pytest.approx(gradient.double().norm().item(), rel=3e-7)


def test_large_tensors_of_a_gpu_are_read_by_one_operator() -> None:
    tensors = [torch.ones(size, device="meta") for size in (1000, 2000)]
    with Operators() as operators:
        tensor_norms(tensors)
    assert operators.seen == ["aten._foreach_norm.Scalar"]
