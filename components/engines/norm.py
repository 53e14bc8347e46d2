"""The norm of a gradient whose parts lie on many ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def global_norm(gradients: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """L2 norm over the parts of all ranks of ``group``, float64 scalar; every rank of it calls this.

    In float64, as a sum of 500,000 squares in float32 is good to 5e-5.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    dist.all_reduce(total, group=group)
    return total.sqrt()
