"""Products in half precision on a CPU without instructions for them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.engines.shared import half_matmul
from components.engines.shared.half_matmul import avoid_slow_products, install_fp32_products

Function = Callable[..., Tensor]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """Compute products in fp32, on any CPU; give the dtypes of the factors that were converted."""
    converted: list[torch.dtype] = []
    original = half_matmul.to_fp32

    def to_fp32(argument: Any) -> Any:
        converted.extend([argument.dtype] if isinstance(argument, Tensor) else [])
        return original(argument)

    monkeypatch.setattr(half_matmul, "to_fp32", to_fp32)
    install_fp32_products()
    yield converted
    install_fp32_products.cache_clear()


def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    return torch.stack([leaf.grad for leaf in leaves if leaf.grad is not None])


FORMS: dict[str, tuple[Function, int, tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, 2, ((5, 40), (40, 7))),
    "transposed": (lambda a, b: a.t() @ b, 2, ((40, 5), (40, 7))),
    "linear": (F.linear, 3, ((2, 5, 40), (7, 40), (7,))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), 3, ((7,), (5, 40), (40, 7))),
    "bmm": (torch.matmul, 2, ((3, 5, 40), (3, 40, 7))),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        3,
        ((3, 5, 7), (3, 5, 40), (3, 40, 7)),
    ),
    "out": (lambda a, b: torch.mm(a, b, out=a.new_empty(7, 5).t()), 2, ((5, 40), (40, 7))),
    "empty out": (lambda a, b: torch.bmm(a, b, out=a.new_empty(0)), 2, ((3, 5, 40), (3, 40, 7))),
    "in place": (lambda c, a, b: torch.addmm(c, a, b, out=c), 3, ((5, 7), (5, 40), (40, 7))),
}
"""Each product with the number of its factors and their shapes."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_the_rounded_product_in_fp32(
    products: list[torch.dtype], form: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    function, number, shapes = FORMS[form]
    factors = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = function(*(factor.float() for factor in factors)).to(dtype)
    assert not products, "fp32 is not converted"
    found = function(*factors)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert products == [dtype] * number


def test_gradients_of_a_product_and_of_attention(products: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(5, 40).bfloat16(), torch.randn(40, 7).bfloat16().requires_grad_()
    (left @ right).sum().backward()
    assert right.grad is not None
    assert torch.equal(right.grad, (left.float().t() @ torch.ones(5, 7)).bfloat16())
    assert len(products) == 4
    products.clear()
    q, k, v = torch.randn(3, 2, 4, 130, 16).bfloat16()
    found, expected = gradient(q, k, v), gradient(q.float(), k.float(), v.float())
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    assert set(products) == {torch.bfloat16, torch.float32}, "the log-sum-exp is in fp32 already"


def test_torch_computes_its_own_products_again(products: list[torch.dtype]) -> None:
    a = torch.ones(2, 2).bfloat16()
    a @ a
    assert products
    products.clear()
    install_fp32_products.cache_clear()
    a @ a
    assert not products


@pytest.mark.parametrize(
    ("device", "dtype", "is_fast", "installed"),
    [
        ("cpu", torch.bfloat16, False, True),
        ("cpu", torch.float16, False, True),
        ("cpu", torch.bfloat16, True, False),
        ("cpu", torch.float32, False, False),
        ("cuda", torch.bfloat16, False, False),
    ],
)
def test_only_a_cpu_without_instructions_needs_it(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, is_fast: bool, installed: bool
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(half_matmul, "has_fast_product", lambda _: is_fast)
    monkeypatch.setattr(half_matmul, "install_fp32_products", lambda: calls.append(True))
    avoid_slow_products(device, dtype)
    assert bool(calls) == installed
