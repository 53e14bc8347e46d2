"""The state of an optimizer of any class, which the class creates in its own first update."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from components.optimizers import TorchClass

UPDATES = "optimizer_step"
"""Key of the number of updates, which AdamW's bias correction needs. Skipped steps do not count."""


class ClassState:
    """The tensors and numbers of an optimizer that was built by a ``TorchClass``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, description: TorchClass, named: Mapping[str, nn.Parameter]
    ) -> None:
        self.optimizer, self.kinds, self.named = optimizer, description.state, named
        self.updates = 0

    def create(self) -> list[nn.Parameter]:
        """Let the optimizer create the state of weights without one, by an update that is then undone.

        The values of the state are those after an update without a gradient: to be overwritten, or not read.

        Returns:
            The parameters of these weights.
        """
        new = [parameter for parameter in self.named.values() if not self.optimizer.state.get(parameter)]
        if not new:
            return []
        kept = [parameter.detach().clone() for parameter in new]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, before in zip(new, kept, strict=True):
            parameter.data.copy_(before)
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)
        return new

    def numbers(self) -> dict[str, Tensor]:
        """Return copies of all numbers, of shape (1,) and in float64, which holds a Python number exactly."""
        states = [state for state in self.optimizer.state.values() if state]
        group = self.optimizer.param_groups[0]
        found = {f"optimizer_state/{name}": states[0][name] for name in self.kinds.scalars}
        found |= {f"optimizer_group/{name}": group[name] for name in self.kinds.group_scalars}
        found[UPDATES] = self.updates
        return {key: torch.tensor([float(value)], dtype=torch.float64) for key, value in found.items()}

    def set_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set all numbers. A checkpoint from before the first update has no state to continue with."""
        self.updates = int(numbers[UPDATES].item())
        if not self.updates:
            self.optimizer.state.clear()
        for state in self.optimizer.state.values():
            for name in self.kinds.scalars:
                value = numbers[f"optimizer_state/{name}"].item()
                if isinstance(state[name], Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = type(state[name])(value)
        for group in self.optimizer.param_groups:
            for name in self.kinds.group_scalars:
                group[name] = type(group[name])(numbers[f"optimizer_group/{name}"].item())

    def whole(self) -> dict[str, Tensor]:
        """Return the tensors that do not have the shape of their weight; every rank has all of them."""
        return {
            f"optimizer_state/{kind}/{name}": self.optimizer.state[parameter][kind]
            for name, parameter in self.named.items()
            for kind in self.kinds.whole
            if isinstance(self.optimizer.state[parameter].get(kind), Tensor)
        }
