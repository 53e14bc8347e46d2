"""Products in half precision on a CPU without instructions for them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.engines.shared import half_matmul
from components.engines.shared.half_matmul import (
    SHORT_SEQUENCE,
    avoid_slow_products,
    install_fp32_attention,
    install_fp32_products,
)

Function = Callable[..., Tensor]


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtypes of the factors that are converted."""
    converted: list[torch.dtype] = []
    original = half_matmul.to_fp32

    def to_fp32(argument: Any) -> Any:
        converted.extend([argument.dtype] if isinstance(argument, Tensor) else [])
        return original(argument)

    monkeypatch.setattr(half_matmul, "to_fp32", to_fp32)
    for install in (install_fp32_products, install_fp32_attention):
        install.cache_clear()
    return converted


@pytest.fixture
def products(converted: list[torch.dtype]) -> Iterator[list[torch.dtype]]:
    """Compute products in fp32, on any CPU; give the dtypes of the factors that were converted."""
    install_fp32_products()
    yield converted
    install_fp32_products.cache_clear()


@pytest.fixture
def short_attention(converted: list[torch.dtype]) -> Iterator[list[torch.dtype]]:
    """Compute attention over short sequences in fp32, on any CPU; give the dtypes that were converted."""
    install_fp32_attention()
    yield converted
    install_fp32_attention.cache_clear()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_a_short_sequence(short_attention: list[torch.dtype], dtype: torch.dtype) -> None:
    """Its gradients are computed in fp32, from the rounded output of the forward pass."""
    torch.manual_seed(0)
    longest = SHORT_SEQUENCE // 64
    q, k, v = torch.randn(3, 1, 2, longest + 1, 64).to(dtype)
    gradient(q, k, v)
    torch.ones(2, 2).to(dtype) @ torch.ones(2, 2).to(dtype)
    assert not short_attention, "a longer sequence and other products are computed by torch"
    short = [each[:, :, :longest] for each in (q, k, v)]
    found, expected = gradient(*short), gradient(*(each.float() for each in short))
    assert set(short_attention) == {dtype, torch.float32}, "the log-sum-exp is in fp32 already"
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


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
        ("cpu", torch.bfloat16, False, ["products"]),
        ("cpu", torch.float16, False, ["products"]),
        ("cpu", torch.bfloat16, True, ["attention"]),
        ("cpu", torch.float16, True, ["attention"]),
        ("cpu", torch.float32, False, []),
        ("cuda", torch.bfloat16, False, []),
    ],
)
def test_which_products_are_computed_in_fp32(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, is_fast: bool, installed: list[str]
) -> None:
    monkeypatch.setattr(half_matmul, "has_fast_product", lambda _: is_fast)
    installers = {"products": install_fp32_products, "attention": install_fp32_attention}
    for installer in installers.values():
        installer.cache_clear()
    avoid_slow_products(device, dtype)
    found = [name for name, installer in installers.items() if installer.cache_info().currsize]
    for installer in installers.values():
        installer.cache_clear()
    assert found == installed


def test_attention_is_replaced_once(monkeypatch: pytest.MonkeyPatch, products: list[torch.dtype]) -> None:
    """In a process that trains in bf16, with instructions for it, and in fp16, without, in either order."""
    monkeypatch.setattr(half_matmul, "has_fast_product", lambda dtype: dtype == torch.bfloat16)
    for dtypes in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
        install_fp32_products.cache_clear()
        for dtype in dtypes:
            avoid_slow_products("cpu", dtype)
        assert install_fp32_products.cache_info().currsize
        assert not install_fp32_attention.cache_info().currsize
    torch.ones(2, 2).half() @ torch.ones(2, 2).half()
    assert products == 2 * [torch.float16]
