"""Copies from host memory to a device, for which the host does not wait."""

import torch
from torch import Tensor

WITHOUT_MEMORY = ("cpu", "meta")
"""Kinds of device that have no memory of their own, to which a copy needs no pinned memory."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; a tensor in host memory is pinned first, unless it is already.

    A copy from pageable memory would make the host wait until the device has done all of its earlier work.
    """
    if tensor.device.type == "cpu" and device.type not in WITHOUT_MEMORY:
        tensor = tensor.contiguous().pin_memory()  # an expanded tensor cannot be pinned
    return tensor.to(device, non_blocking=True)
