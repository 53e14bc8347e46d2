"""When torch.compile can generate kernels for a GPU."""

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from components.engines.shared import generated_kernels


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "compiles", "expected"),
    [
        ("cuda", torch.bfloat16, (8, 0), True, True),
        ("cuda", torch.float32, (7, 0), True, True),
        ("cuda", torch.bfloat16, (7, 5), True, False),
        ("cuda", torch.float32, (6, 1), True, False),
        ("cuda", torch.float32, (9, 0), False, False),
        ("cpu", torch.float32, (9, 0), True, False),
    ],
)
def test_what_generated_kernels_need(
    device: str, dtype: torch.dtype, capability: tuple[int, int], compiles: bool, expected: bool
) -> None:
    with FakeTensorMode():
        tensor = torch.empty(4, device=device, dtype=dtype)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch.object(generated_kernels, "can_compile", return_value=compiles),
    ):
        assert generated_kernels.is_available(tensor) is expected
