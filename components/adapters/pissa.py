"""The factors from which PiSSA starts (Meng et al., 2024, https://arxiv.org/abs/2404.02948, section 3)."""

import torch
from torch import Tensor

from components.models.initialize import seeded


@torch.no_grad()
def principal_factors(
    weight: Tensor, r: int, scaling: float, niter: int | None, seed: int, name: str
) -> tuple[Tensor, Tensor]:
    """Return A ``[r, in]`` and B ``[out, r]``, in fp32, of the principal part of ``weight`` ``[out, in]``.

    ``scaling * B A`` is the matrix of rank r that is nearest to ``weight``, by the formulas of peft's
    ``pissa_init``. ``niter`` is the number of power iterations of a randomised decomposition, whose random
    numbers depend only on ``seed`` and ``name``. None means the exact decomposition.
    """
    weight = weight.float()
    if niter is None:
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        with seeded(seed, name):
            left, sizes, right = torch.svd_lowrank(weight, r, niter)
        right = right.T
    roots = (sizes[:r] / scaling).sqrt().diag()
    return roots @ right[:r], left[:, :r] @ roots
