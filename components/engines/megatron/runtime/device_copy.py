"""Copies from host memory to the device, for which the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in host memory to ``device``; for a GPU it is pinned first, unless it is already.

    A copy from pageable memory would make the host wait until the GPU has done all of its earlier work.
    """
    # An expanded tensor cannot be pinned.
    source = tensor.contiguous().pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)
