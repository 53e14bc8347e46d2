"""The weights of FSDP2, sharded between steps, for an optimizer that updates full (unsharded) weights."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from components.engines.fsdp2.mesh import full_tensor, local_shard, shard_slices
from components.engines.fsdp2.param_views import ParamView
from components.engines.shared.whole_weights import OwnedWeight

Groups = dict[tuple[int, ...], dist.ProcessGroup]


class ShardedWeight(OwnedWeight):
    """A weight whose value and gradient are gathered on its owner for every update.

    The updated value is then sharded again.
    """

    def __init__(self, view: ParamView, groups: Groups) -> None:
        self.view = view
        shard, self.group = self.shard, None
        if isinstance(shard, DTensor) and shard.device_mesh.size() > 1:
            ranks = tuple(shard.device_mesh.mesh.flatten().tolist())
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            self.group = groups[ranks]
        place, sharers = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        super().__init__(view.name, shard.shape, shard.device, place=place, sharers=sharers)

    @property
    def shard(self) -> Tensor:
        return self.view.slices(self.view.parameter.detach())

    @property
    def has_gradient(self) -> bool:  # type: ignore[override]
        return self.view.parameter.grad is not None

    def gather(self) -> None:
        assert self.view.parameter.grad is not None, f"{self.name} has no gradient"
        self._gather("data", self.shard)
        self._gather("grad", self.view.slices(self.view.parameter.grad))

    def _gather(self, field: Literal["data", "grad"], part: Tensor) -> None:
        """Gather one full tensor. Ranks that are not the owner free it before the next one is gathered."""
        whole = full_tensor(part)
        if self.is_mine:
            setattr(self.parameter, field, whole)

    def distribute(self) -> None:
        """Copy the owner's value into the shards of all ranks, and free the full tensor."""
        shard = self.shard
        whole = self.parameter.data if self.is_mine else torch.empty(shard.shape, device=shard.device)
        if self.group is not None:
            dist.broadcast(whole, group=self.group, group_src=self.owner)
        local_shard(shard).copy_(whole[shard_slices(shard)])
        self.parameter.data = torch.empty((0,) * shard.ndim, device=shard.device)


def whole_weights(views: Sequence[ParamView]) -> list[ShardedWeight]:
    """Return a ``ShardedWeight`` for each of ``views``; collective over the ranks that share the weights."""
    groups: Groups = {}
    return [ShardedWeight(view, groups) for view in views]
