"""When torch's kernel for the products of all experts is used."""

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from components.engines.shared.grouped_mm import has_grouped_kernel


@pytest.mark.parametrize(
    ("capability", "rows", "width", "outputs", "dtype", "expected"),
    [
        ((9, 0), 4, 64, 32, torch.bfloat16, True),
        ((8, 0), 4, 64, 32, torch.bfloat16, False),  # there torch copies the loads to the host
        ((12, 0), 4, 64, 32, torch.bfloat16, False),  # and there
        ((9, 0), 0, 64, 32, torch.bfloat16, False),
        ((9, 0), 4, 60, 32, torch.bfloat16, False),
        ((9, 0), 4, 64, 30, torch.bfloat16, False),
        ((9, 0), 4, 64, 32, torch.float32, False),
    ],
)
def test_what_the_kernel_needs(
    capability: tuple[int, int], rows: int, width: int, outputs: int, dtype: torch.dtype, expected: bool
) -> None:
    with FakeTensorMode():
        tokens = torch.empty(rows, width, device="cuda", dtype=dtype)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert has_grouped_kernel(tokens, outputs) is expected
