"""Functions that free FSDP's state between passes: gathered weights, and gradients not reduced yet."""

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from components.engines.shared.torch_private import drop_unreduced, has_run, reset_iteration


def fsdp_modules(scorer: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in scorer.modules() if isinstance(module, FSDPModule))


def release(scorer: nn.Module) -> None:
    """Free the gathered weights left by a forward pass without backward: an update does not change them."""
    for module in fsdp_modules(scorer):
        module.reshard()


def discard_iteration(scorer: nn.Module) -> None:
    """Discard a forward or backward pass that did not finish, and all gradients not reduced yet.

    FSDP's own reset keeps the gradients that ``set_requires_gradient_sync(False)`` has accumulated in the
    unsharded parameters, and no public call can drop these.
    """
    assert isinstance(scorer, FSDPModule)
    if not has_run(scorer):
        return
    reset_iteration(scorer)
    release(scorer)
    for module in fsdp_modules(scorer):
        drop_unreduced(module)
