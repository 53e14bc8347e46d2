"""The optimizer of an update that needs whole weights, such as an orthogonalised matrix.

Every weight has an owner among the ranks that share it. In a step, its gradient and value are gathered, the
owner updates it with the optimizer's own class, and every rank receives its shard of the result. So the work
and the state, which is never sharded, are divided by weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from components.engines.fsdp2.class_state import (
    UPDATES,
    create_state,
    group_numbers,
    number,
    set_group_numbers,
)
from components.engines.fsdp2.mesh import full_tensor, local_shard, shard_slices
from components.engines.fsdp2.param_views import ParamView
from components.optimizers import Optimizer, TorchClass, kind_of_state, torch_optimizer


@dataclass(frozen=True)
class OwnedWeight:
    """A weight that is updated whole on one of the ranks that share it."""

    view: ParamView
    group: dist.ProcessGroup | None
    """The ranks that share it. None means that every rank has all of it and updates it."""
    owner: int
    """Rank in ``group`` of the owner."""
    parameter: nn.Parameter
    """The whole weight during the update, on the owner; empty between steps."""

    @property
    def is_mine(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == self.owner

    @property
    def gradient(self) -> Tensor:
        assert self.view.parameter.grad is not None, f"{self.view.name} has no gradient"
        return self.view.parameter.grad

    @property
    def shard(self) -> Tensor:
        return self.view.slices(self.view.parameter.detach())


class WholeWeightOptimizer:
    """A torch optimizer over the whole weights that this rank owns. All ranks make every call together."""

    def __init__(self, description: Optimizer, views: Sequence[ParamView]) -> None:
        self.weights = assigned(views)
        self.owned = {weight.view.name: weight for weight in self.weights if weight.is_mine}
        named = [(name, weight.parameter) for name, weight in self.owned.items()]
        self.optimizer = torch_optimizer(description, named) if named else None
        self.group_kinds = description.state.group_scalars if isinstance(description, TorchClass) else ()
        self.updates = 0

    def step(self, lr: float) -> None:
        """Update the weights in place from their gradients; weights without one are left as they are."""
        updated = [weight for weight in self.weights if weight.view.parameter.grad is not None]
        for weight in updated:
            gradient = full_tensor(weight.view.slices(weight.gradient))
            whole = full_tensor(weight.shard)
            if weight.is_mine:
                weight.parameter.data, weight.parameter.grad = whole, gradient
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        for weight in updated:
            distribute(weight)
        self.updates += 1

    @contextmanager
    def evaluating(self) -> Iterator[bool]:
        """Do nothing: an optimizer with other weights for evaluation is not given whole weights."""
        yield False

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the weights that this rank owns, by key of a checkpoint."""
        created = self._create()
        tensors = self._state()
        for weight in created:
            del self._of(weight)[weight.parameter]
        return tensors

    @contextmanager
    def loading(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors to read from a checkpoint, and take over their values at the end."""
        self._create()
        tensors = self._state()
        yield tensors
        self.updates = int(tensors[UPDATES].item())
        if self.optimizer is not None:
            set_group_numbers(self.optimizer, self.group_kinds, tensors)
        for name, weight in self.owned.items():
            state = self._of(weight)[weight.parameter]
            for kind, value in state.items():
                if isinstance(value, int | float):
                    state[kind] = type(value)(tensors[f"optimizer_state/{kind}/{name}"].item())
            if not self.updates:  # saved before the first update, which creates the state
                del self._of(weight)[weight.parameter]

    def _state(self) -> dict[str, Tensor]:
        tensors = {UPDATES: number(self.updates)}
        if self.optimizer is not None:
            tensors |= group_numbers(self.optimizer, self.group_kinds)
        for name, weight in self.owned.items():
            for kind, value in self._of(weight)[weight.parameter].items():
                if kind_of_state(weight.shard.shape, value) == "moment":
                    tensors[f"{kind}/{name}"] = value
                elif isinstance(value, Tensor):
                    tensors[f"optimizer_state/{kind}/{name}"] = value
                elif value is not None:
                    tensors[f"optimizer_state/{kind}/{name}"] = number(value)
        return tensors

    def _create(self) -> list[OwnedWeight]:
        """Let the optimizer create the state of weights without one, by an update of zeros."""
        new = [weight for weight in self.owned.values() if not self._of(weight).get(weight.parameter)]
        for weight in new:
            weight.parameter.data = torch.zeros(weight.shard.shape, device=weight.parameter.device)
        if self.optimizer is not None:
            create_state(self.optimizer, [weight.parameter for weight in new])
        for weight in new:
            weight.parameter.data = empty_like(weight.shard)
        return new

    def _of(self, weight: OwnedWeight) -> dict[Tensor, dict[str, Any]]:
        assert self.optimizer is not None, f"{weight.view.name} is owned without an optimizer"
        return self.optimizer.state


def assigned(views: Sequence[ParamView]) -> list[OwnedWeight]:
    """Give every weight to the rank with the fewest elements so far, of those that share the weight."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    loads: dict[tuple[int, ...], list[int]] = {}
    weights = []
    for view in views:
        shard, group, owner = view.slices(view.parameter.detach()), None, 0
        if isinstance(shard, DTensor) and shard.device_mesh.size() > 1:
            ranks = tuple(shard.device_mesh.mesh.flatten().tolist())
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            load = loads.setdefault(ranks, [0] * len(ranks))
            group, owner = groups[ranks], load.index(min(load))
            load[owner] += shard.numel()
        weights.append(OwnedWeight(view, group, owner, nn.Parameter(empty_like(shard))))
    return weights


def distribute(weight: OwnedWeight) -> None:
    """Copy the owner's updated weight into the shards of all ranks, and free it."""
    shard = weight.shard
    whole = weight.parameter.data if weight.is_mine else torch.empty(shard.shape, device=shard.device)
    if weight.group is not None:
        dist.broadcast(whole, group=weight.group, group_src=weight.owner)
    local_shard(shard).copy_(whole[shard_slices(shard)])
    weight.parameter.data = empty_like(shard)


def empty_like(shard: Tensor) -> Tensor:
    """Return a tensor without elements of the dtype, device and number of dimensions of ``shard``."""
    return torch.empty((0,) * shard.ndim, dtype=shard.dtype, device=shard.device)
