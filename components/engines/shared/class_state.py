"""Saving and loading the state of any ``torch.optim.Optimizer``; the first update creates this state."""

from collections.abc import Container, Iterable, Mapping
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from components.optimizers import StateKinds, TorchClass

UPDATES = "optimizer_step"
"""Key of the number of updates, which AdamW's bias correction needs. Skipped steps do not count."""


class ClassState:
    """The scalar state of an elementwise optimizer that a ``TorchClass`` built."""

    def __init__(self, optimizer: torch.optim.Optimizer, description: TorchClass) -> None:
        self.optimizer, self.kinds = optimizer, description.state
        self.updates = 0

    def numbers(self) -> dict[str, Tensor]:
        """Return copies of all scalars of the state, by checkpoint key, as float64 ``[1]``."""
        states = [state for state in self.optimizer.state.values() if state]
        found = {f"optimizer_state/{name}": as_float64(states[0][name]) for name in self.kinds.scalars}
        found |= group_numbers(self.optimizer, self.kinds.group_scalars)
        return found | {UPDATES: as_float64(self.updates)}

    def set_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set all scalars of the state to those that ``numbers`` returned.

        If they are from before the first update, clear the state of all parameters.
        """
        self.updates = int(numbers[UPDATES].item())
        if not self.updates:
            self.optimizer.state.clear()
        for state in self.optimizer.state.values():
            for name in self.kinds.scalars:
                set_number(state, name, numbers[f"optimizer_state/{name}"])
        set_group_numbers(self.optimizer, self.kinds.group_scalars, numbers)


def stateless(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], nn.Parameter]]:
    """Return the parameters without state, each with its group."""
    return [(g, p) for g in optimizer.param_groups for p in g["params"] if not optimizer.state.get(p)]


def create_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> None:
    """Update ``parameter`` of ``group`` so that the optimizer creates its state, then restore its value.

    The gradient of this update is zero. The caller must overwrite or ignore the values of the state. To
    update all parameters at once would need gradients and copies of all of them in memory.
    """
    kept, groups, options = parameter.detach().clone(), [*optimizer.param_groups], dict(group)
    # Some classes expect a gradient in each of their groups.
    optimizer.param_groups[:], group["params"] = [group], [parameter]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    parameter.grad = None
    parameter.data.copy_(kept)
    group.clear()  # the update may have added keys, such as a number of updates
    group.update(options)
    optimizer.param_groups[:] = groups


def group_numbers(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the options ``names`` of ``param_groups``, by checkpoint key, as float64 ``[1]``.

    Each of them is equal in all groups. NaN means that no update has added it yet.
    """
    group = optimizer.param_groups[0]
    return {f"optimizer_group/{name}": as_float64(group.get(name, nan)) for name in names}


def without_constants(
    numbers: Mapping[str, Tensor], kinds: StateKinds, saved: Container[str]
) -> dict[str, Tensor]:
    """Return ``numbers`` without the constants of groups that a checkpoint with the keys ``saved`` lacks.

    The checkpoints of earlier versions lack all of them.
    """
    constants = {f"optimizer_group/{name}" for name in kinds.group_constants}
    return {key: value for key, value in numbers.items() if key in saved or key not in constants}


def set_group_numbers(
    optimizer: torch.optim.Optimizer, kinds: Mapping[str, type[int | float]], numbers: Mapping[str, Tensor]
) -> None:
    """Set the options ``kinds``, by name and type, of all groups to what ``group_numbers`` returned."""
    for group in optimizer.param_groups:
        for name, kind in kinds.items():
            value = numbers[f"optimizer_group/{name}"].item()
            if name in group or not isnan(value):
                group[name] = kind(value)


def set_number(state: dict[str, Any], name: str, value: Tensor) -> None:
    """Set ``state[name]``, a tensor or a Python number, to a value that ``as_float64`` returned."""
    if isinstance(state[name], Tensor):
        state[name].fill_(value.item())
    else:
        state[name] = type(state[name])(value.item())


def as_float64(value: Tensor | float) -> Tensor:
    """Return a scalar of an optimizer as float64 ``[1]``, which represents any Python float exactly."""
    return torch.tensor([float(value)], dtype=torch.float64)
