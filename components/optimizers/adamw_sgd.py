"""AdamW and SGD."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from components.contracts.errors import ConfigError, check_at_least_zero
from components.optimizers.weight_groups import ParamGroup, WeightGroup, check_groups

Scope = Literal["element", "matrix", "model"]
"""Part of the model that an update needs at once: an element, a weight, or all weights."""


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    lr: float = 1e-3
    """Peak learning rate, from which the scheduler computes the rate of each step."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    """Maximum L2 norm of all gradients together, to which gradients are scaled down. None or 0 means no
    maximum."""
    groups: tuple[WeightGroup, ...] = ()

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """State per parameter, under torch's names, each of the parameter's shape."""
    kind: ClassVar[str] = "adamw"
    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        check_at_least_zero("optimizer", self, "lr", "eps", "weight_decay", "max_grad_norm")
        check_groups(self.groups, self.lr)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas: both must be at least 0 and below 1, got {list(self.betas)}."
            )

    def build(self, groups: list[ParamGroup]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent; weight decay is added to the gradient, as in torch."""

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    groups: tuple[WeightGroup, ...] = ()

    kind: ClassVar[str] = "sgd"
    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        check_at_least_zero("optimizer", self, "lr", "momentum", "weight_decay", "max_grad_norm")
        check_groups(self.groups, self.lr)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optimizer.nesterov: needs momentum; set optimizer.momentum above 0.")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def build(self, groups: list[ParamGroup]) -> torch.optim.Optimizer:
        # Fused SGD has no rule for sharded tensors (torch 2.13); foreach gives the same numbers.
        return torch.optim.SGD(
            groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov, foreach=True
        )
