"""A product that is added to a matrix of a higher precision."""

import pytest
import torch

from components.engines.shared import added_product
from components.engines.shared.added_product import add_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 0])
def test_it_is_the_product_and_the_sum(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(added_product, "CPU_BLOCK_BYTES", 50)  # blocks of a few rows
    torch.manual_seed(0)
    gradient, inputs = torch.randn(rows, 12).to(dtype), torch.randn(rows, 5).to(dtype)
    total = torch.randn(12, 5)
    expected = total + (gradient.t() @ inputs).float()
    add_product(total, gradient.t(), inputs)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
