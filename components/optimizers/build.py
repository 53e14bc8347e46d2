"""The torch optimizer of a description."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from components.optimizers.adamw_sgd import SGD, AdamW
from components.optimizers.muon import Muon
from components.optimizers.torch_class import TorchClass

Optimizer = AdamW | SGD | Muon | TorchClass


def decays(name: str, ndim: int) -> bool:
    """Return whether weight decay applies to a parameter: not to biases and one-dimensional ones (norms).

    It depends on Hugging Face name and shape, so that engines that fuse or split tensors agree.
    """
    return ndim > 1 and not name.endswith(".bias")


def torch_optimizer(
    description: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the torch optimizer over Hugging Face names and their (possibly sharded) parameters.

    Its groups share one learning rate, which the engine sets at every step.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for decayed in (True, False):
        members = [(name, p) for name, p in named if decays(name, p.ndim) is decayed]
        if members:
            groups.append({"params": members, "weight_decay": description.weight_decay if decayed else 0.0})
    return build_optimizer(description, groups)


def build_optimizer(description: Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if isinstance(description, Muon | TorchClass):
        return description.build(groups)
    if isinstance(description, AdamW):
        return torch.optim.AdamW(
            groups, lr=description.lr, betas=description.betas, eps=description.eps, fused=True
        )
    # Fused SGD has no rule for sharded tensors (torch 2.13); foreach gives the same numbers.
    return torch.optim.SGD(
        groups, lr=description.lr, momentum=description.momentum, nesterov=description.nesterov, foreach=True
    )


def make_moments(optimizer: torch.optim.Optimizer, moments: Sequence[str]) -> None:
    """Create zero moments, as torch's optimizers do, for parameters that have not been updated yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state and moments:
                state.update({moment: torch.zeros_like(parameter.detach()) for moment in moments})
                if isinstance(optimizer, torch.optim.AdamW):  # fused ones of other packages count by group
                    device = parameter.device if group.get("fused") else torch.device("cpu")
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
