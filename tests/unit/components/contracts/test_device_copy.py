"""Copies to a device."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from components.contracts.device_copy import to_device

GPU, HOST, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")


def test_a_copy_to_a_gpu_is_from_pinned_memory() -> None:
    tensor = Mock(spec=Tensor, device=HOST)
    to_device(tensor, GPU)
    pinned = tensor.contiguous.return_value.pin_memory.return_value
    pinned.to.assert_called_once_with(GPU, non_blocking=True)


@pytest.mark.parametrize(("where", "device"), [(GPU, GPU), (GPU, HOST), (HOST, HOST), (HOST, META)])
def test_other_copies_need_no_pinned_memory(where: torch.device, device: torch.device) -> None:
    tensor = Mock(spec=Tensor, device=where)
    to_device(tensor, device)
    tensor.contiguous.assert_not_called()
    tensor.to.assert_called_once_with(device, non_blocking=True)
