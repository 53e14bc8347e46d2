"""FSDP's state between passes (gathered weights, gradients not reduced yet), and memory of its reductions."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from components.engines.shared.torch_private import drop_unreduced, has_run, reset_iteration


def fsdp_modules(scorer: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in scorer.modules() if isinstance(module, FSDPModule))


class InPlaceReduceScatter:
    """The memory of reduce-scatters over one rank, for ``set_custom_reduce_scatter``.

    For every reduction FSDP allocates an input and then an output, and on one rank it only copies the first
    to the second. Here the output is the input, so that nothing is copied.
    """

    def __init__(self) -> None:
        self.output_is_input = True
        """Must be False while FSDP adds outputs to earlier gradients. FSDP frees an input after its
        reduction, without waiting for the stream that adds the output to these gradients, so that only an
        output with memory of its own is safe."""
        self.input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.input is not None:
            output, self.input = self.input, None
            assert output.shape == torch.Size(size), "the output of a reduction over one rank is its input"
            return output
        allocated = torch.empty(size, dtype=dtype, device=device)
        self.input = allocated if self.output_is_input else None
        return allocated

    def reset(self) -> None:
        """Forget the input of a reduction that did not finish."""
        self.input = None


def release(scorer: nn.Module) -> None:
    """Free what forward passes without backward leave.

    This is gathered weights, which an update does not change, and FSDP's lists of the modules that have run,
    which only the end of a backward pass would clear: those of a frozen reference would grow for ever.
    """
    assert isinstance(scorer, FSDPModule)
    if not has_run(scorer):
        return
    reset_iteration(scorer)
    for module in fsdp_modules(scorer):
        module.reshard()


def discard_iteration(scorer: nn.Module) -> None:
    """Discard a forward or backward pass that did not finish, and all gradients not reduced yet.

    FSDP's own reset keeps the gradients that ``set_requires_gradient_sync(False)`` has accumulated in the
    unsharded parameters, and no public call can drop these.
    """
    release(scorer)
    for module in fsdp_modules(scorer):
        drop_unreduced(module)
