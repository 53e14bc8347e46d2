"""Copies to a device that do not block the host."""

import torch
from torch import Tensor

UNPINNED = ("cpu", "meta")
"""Kinds of device to which tensors are copied without pinning."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A host tensor is copied to pinned memory first, unless it is there.

    For a copy from pageable memory, the host may wait until the device has done all of its earlier work.
    """
    if tensor.device.type == "cpu" and device.type not in UNPINNED:
        # Expanded tensors cannot be pinned, and torch copies some other strides through pageable memory.
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)
