"""Building the torch optimizer from its description."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from components.optimizers.adamw_sgd import SGD, AdamW
from components.optimizers.muon import Muon
from components.optimizers.torch_class import TorchClass
from components.optimizers.weight_groups import find_group

Optimizer = AdamW | SGD | Muon | TorchClass


def decays(name: str, ndim: int) -> bool:
    """Return whether weight decay applies to a parameter: it is neither a bias nor one-dimensional (a norm).

    The result depends only on the Hugging Face name and shape, so it is the same for engines that fuse or
    split tensors.
    """
    return ndim > 1 and not name.endswith(".bias")


@dataclass(frozen=True)
class WeightOptions:
    """Options of a weight, under the names that its group has in the torch optimizer."""

    weight_decay: float
    lr_scale: float
    """Ratio of the weight's learning rate to that of the scheduler."""
    has_own_lr: bool
    """Whether a group of ``optimizer.groups`` sets the learning rate of this weight."""


def weight_options(description: Optimizer, name: str, ndim: int) -> WeightOptions:
    """Return the options of the weight ``name`` on disk: those of its group, or those of ``description``."""
    decay = description.weight_decay if decays(name, ndim) else 0.0
    group = find_group(description.groups, name)
    if group is None:
        return WeightOptions(decay, 1.0, has_own_lr=False)
    own = group.lr is not None
    scale = group.lr / description.lr if group.lr else float(not own)
    return WeightOptions(decay if group.weight_decay is None else group.weight_decay, scale, own)


def torch_optimizer(
    description: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the torch optimizer over Hugging Face names and their (possibly sharded) parameters.

    The engine sets the learning rate of each group at every step, as a multiple ``lr_scale`` of one rate.
    """
    groups: dict[WeightOptions, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            options = weight_options(description, name, parameter.ndim)
            groups.setdefault(options, []).append((name, parameter))
    ordered = sorted(groups.items(), key=lambda item: -item[0].weight_decay)
    return description.build([{"params": of, **asdict(options)} for options, of in ordered])


def needs_whole_weights(optimizer: Optimizer) -> bool:
    """Return whether an update on FSDP2 is that of unsharded weights, which are gathered on their owners.

    Classes with other weights for evaluation update shards, or train on one rank only.
    """
    return optimizer.scope != "element" and not (
        isinstance(optimizer, TorchClass) and optimizer.has_eval_weights
    )


def state_bytes(optimizer: Optimizer) -> float:
    """Return the bytes of optimizer state per element of a large matrix.

    With Muon, this is a matrix that AdamW updates, which has the most state.
    """
    return optimizer.state_bytes if isinstance(optimizer, TorchClass) else 4.0 * len(optimizer.moments)


def make_moments(optimizer: torch.optim.Optimizer, moments: Sequence[str]) -> None:
    """Create zero moments, as torch's optimizers do, for parameters that have not been updated yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and moments:
                state.update({moment: torch.zeros_like(parameter.detach()) for moment in moments})
                if isinstance(optimizer, torch.optim.AdamW):  # SGD counts no steps
                    device = parameter.device if group.get("fused") else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
