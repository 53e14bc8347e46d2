"""FSDP's own state between passes: what it has gathered, and what it has not reduced yet."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def fsdp_modules(scorer: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in scorer.modules() if isinstance(module, FSDPModule))


def release(scorer: nn.Module) -> None:
    """Frees the gathered weights that a forward without backward leaves: no update would reach them."""
    for module in fsdp_modules(scorer):
        module.reshard()


def discard_iteration(scorer: nn.Module) -> None:
    """Forgets a forward or backward that did not finish, and every gradient not reduced yet.

    FSDP's own reset keeps what ``set_requires_gradient_sync(False)`` has accumulated in the unsharded
    parameters, which no public call can drop.
    """
    assert isinstance(scorer, FSDPModule)
    state = scorer._get_fsdp_state()
    if state._is_root is None:
        return  # no forward has run yet
    if hasattr(scorer, "reset_iter_state"):
        scorer.reset_iter_state()
    else:
        reset_by_hand(state)
    release(scorer)
    for module in fsdp_modules(scorer):
        for group in param_groups(module._get_fsdp_state()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def reset_by_hand(root: Any) -> None:
    """``reset_iter_state`` for torch before 2.13, which has none."""
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        for group in param_groups(state):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
    root._comm_ctx.post_forward_order.clear()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def param_groups(state: Any) -> list[Any]:
    """A list since torch 2.13; one or none before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if groups is None else groups
