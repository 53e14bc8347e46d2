"""Descriptions of optimizers, which each engine implements in its own way."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from components.contracts.errors import ConfigError


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    lr: float = 1e-3
    """Peak learning rate, from which the scheduler computes the rate of each step."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    """L2 norm over all parameters to which larger gradients are scaled down. None or 0 means never."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """State per parameter, under torch's names, each of the parameter's shape."""

    def __post_init__(self) -> None:
        check_at_least_zero(self, "lr", "eps", "weight_decay", "max_grad_norm")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas: both must be at least 0 and below 1, got {list(self.betas)}."
            )


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent; weight decay is added to the gradient, as in torch."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_at_least_zero(self, "lr", "momentum", "weight_decay", "max_grad_norm")
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov: needs momentum; set optimizer.momentum above 0.")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()


Optimizer = AdamW | SGD


def check_at_least_zero(description: object, *names: str) -> None:
    for name in names:
        value = getattr(description, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"optimizer.{name}: must be a number of at least 0, got {value}.")


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
    groups: list[dict[str, object]] = []
    for decayed in (True, False):
        members = [(name, p) for name, p in named if decays(name, p.ndim) is decayed]
        if members:
            groups.append({"params": members, "weight_decay": description.weight_decay if decayed else 0.0})
    return build_optimizer(description, groups)


def build_optimizer(description: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
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
