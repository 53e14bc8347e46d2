"""Muon for the matrices of the blocks, and AdamW for all other weights."""

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from components.contracts.errors import ConfigError, check_at_least_zero
from components.optimizers.adamw_sgd import AdamW, Scope
from components.optimizers.weight_groups import ParamGroup, WeightGroup

TORCH_LIMIT = 100
"""Least number of Newton-Schulz iterations that ``torch.optim.Muon`` refuses."""
HEADS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
"""Ends of the names of matrices whose rows are heads."""


@dataclass(frozen=True)
class Muon:
    """Momentum, orthogonalised for each matrix by Newton-Schulz iterations (Jordan et al., 2024).

    The update is that of ``torch.optim.Muon``. Matrices are orthogonalised unsharded, with their shapes on
    disk: query, key, value, gate and up projections, and those of each expert, are separate matrices.
    """

    lr: float = 1e-3
    """Peak learning rate, from which the scheduler computes the rate of each step."""
    adamw_lr: float | None = None
    """Peak learning rate of AdamW, with the schedule of ``lr``. None means ``lr``."""
    adamw_for: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "lm_head*", "score*")
    """Patterns of the names of matrices that AdamW updates, with all vectors."""
    head_dim: int | None = None
    """Number of rows of a head in the query, key and value matrices, whose heads are then orthogonalised
    separately. None means that these matrices are orthogonalised like others."""
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of a matrix's learning rate. ``match_rms_adamw`` means 0.2 sqrt(max(rows, columns)), with which
    updates are as large as those of AdamW (Liu et al., 2025). ``original`` means sqrt(max(1, rows /
    columns))."""
    betas: tuple[float, float] = AdamW.betas
    """Decay rates of AdamW's moments."""
    eps: float = AdamW.eps
    """Constant in the denominator of AdamW."""
    max_grad_norm: float | None = 1.0
    groups: tuple[WeightGroup, ...] = ()

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer", "exp_avg_sq")
    """Maximum state per weight, of which only the number of tensors is read: matrices that Muon updates have
    one tensor, other weights have the two of AdamW."""
    kind: ClassVar[str] = "muon"
    scope: ClassVar[Scope] = "matrix"

    def __post_init__(self) -> None:
        AdamW(self.lr, self.betas, self.eps, self.weight_decay, self.max_grad_norm, self.groups)  # checks
        check_at_least_zero("optimizer", self, "adamw_lr", "momentum", "ns_steps")
        if self.ns_steps >= TORCH_LIMIT:
            raise ConfigError(f"optimizer.ns_steps: must be below {TORCH_LIMIT}, got {self.ns_steps}.")
        if self.adamw_lr and not self.lr:
            raise ConfigError(
                "optimizer.adamw_lr: follows the schedule of optimizer.lr, which is 0; set optimizer.lr "
                "above 0."
            )

    def orthogonalises(self, name: str, ndim: int) -> bool:
        """Return whether Muon, not AdamW, updates the weight ``name`` on disk with ``ndim`` dimensions."""
        return ndim == 2 and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.adamw_for)

    def build(self, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer:
        """Return the optimizer over groups of ``(name, parameter)`` pairs."""
        chosen: dict[bool, list[ParamGroup]] = {True: [], False: []}
        others = 1.0 if self.adamw_lr is None or not self.lr else self.adamw_lr / self.lr
        for group in groups:
            for orthogonal, members in chosen.items():
                pairs = group["params"]
                params = [pair for pair in pairs if self.orthogonalises(pair[0], pair[1].ndim) is orthogonal]
                if params:
                    ratio = 1.0 if orthogonal or group["has_own_lr"] else others
                    members.append(group | {"params": params, "lr_scale": group["lr_scale"] * ratio})
        parts: list[torch.optim.Optimizer] = []
        if chosen[True]:
            parts.append(
                MuonByHead(
                    chosen[True],
                    self.head_dim,
                    lr=self.lr,
                    momentum=self.momentum,
                    nesterov=self.nesterov,
                    ns_steps=self.ns_steps,
                    adjust_lr_fn=self.adjust_lr,
                )
            )
        if chosen[False]:
            parts.append(torch.optim.AdamW(chosen[False], lr=self.lr, betas=self.betas, eps=self.eps))
        return Chained(parts)


@contextmanager
def muon_in_float32() -> Iterator[None]:
    """Let ``torch.optim.Muon`` orthogonalise in float32, so that layouts can be compared to 1e-5.

    Its iterations in bfloat16 turn differences of 1e-7 between the gradients of two layouts into 4e-3 in a
    few elements of an update, and so into 2e-5 of a gradient norm five steps later.
    """
    tensor: Any = torch.Tensor
    plain = tensor.bfloat16
    tensor.bfloat16 = tensor.clone
    try:
        yield
    finally:
        tensor.bfloat16 = plain


class MuonByHead(torch.optim.Muon):
    """``torch.optim.Muon`` that orthogonalises the heads of query, key and value matrices separately.

    If ``head_dim`` is None, it orthogonalises these matrices like others.
    """

    def __init__(self, groups: Sequence[ParamGroup], head_dim: int | None, **options: Any) -> None:
        named = [pair for group in groups for pair in group["params"]]
        self.split = {p for name, p in named if head_dim is not None and name.endswith(HEADS)}
        self.head_dim = head_dim
        super().__init__(groups, **options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all parameters, those in ``split`` head by head."""
        wholes = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [part for whole in group["params"] for part in self._parts(whole)]
        super().step()
        for group, params in zip(self.param_groups, wholes, strict=True):
            for part in set(group["params"]) - set(params):
                del self.state[part]
            group["params"] = params

    def _parts(self, whole: nn.Parameter) -> list[nn.Parameter]:
        """Return the heads of ``whole`` as parameters that share its value, gradient and momentum."""
        if whole not in self.split or whole.grad is None:
            return [whole]
        assert self.head_dim is not None
        state = self.state[whole]
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(whole.grad))
        parts = [nn.Parameter(rows) for rows in whole.detach().split(self.head_dim)]
        for part, gradient, buffer in zip(
            parts, whole.grad.split(self.head_dim), momentum.split(self.head_dim), strict=True
        ):
            part.grad = gradient
            self.state[part] = {"momentum_buffer": buffer}
        return parts


class Chained(torch.optim.Optimizer):
    """Several optimizers of different parameters, with one list of groups and one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([nn.Parameter(torch.empty(0))], {})
        self.param_groups = groups
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
