"""Updates by an optimizer of full (unsharded) weights, such as Muon, in place of Megatron's own optimizers.

Gradients are summed over data ranks as with Megatron's optimizers. The owner of a Hugging Face tensor keeps
the tensor's master weights and optimizer state, and gathers its gradient over tensor-parallel ranks. With the
distributed optimizer, each weight is updated on one data rank; without it, every data rank updates all
weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from components.engines.megatron.runtime.hf_weights import (
    HFTensorSlice,
    HFTensorSlices,
    TPMeshes,
    full_hf_tensor,
    replicas,
)
from components.engines.shared.loss_accumulator import clip, count_zeros, global_norm
from components.engines.shared.whole_weights import OwnedWeight, WholeWeightOptimizer
from components.optimizers import Optimizer


class MegatronWeight(OwnedWeight):
    """A Hugging Face tensor of which this rank holds the slice ``member``.

    The owner of the tensor keeps the master weights.
    """

    def __init__(
        self, slot: nn.Parameter, member: HFTensorSlice, mesh: DeviceMesh, *, divided: bool, number: int
    ) -> None:
        copies, place, sharers = replicas(slot), mesh.get_local_rank(), mesh.size()
        self.slot, self.member, self.mesh, self.copies = slot, member, mesh, copies if divided else None
        if divided:
            place, sharers = place + sharers * copies.rank(), sharers * copies.size()
        super().__init__(member.name, member.shape, slot.device, place=place, sharers=sharers)
        self.writes = member.primary and (divided or number % copies.size() == copies.rank())

    def gather(self) -> None:
        self.parameter.grad = self.gathered(self.slot.main_grad)  # type: ignore[attr-defined]

    def gathered(self, tensor: Tensor) -> Tensor | None:
        """Return the full Hugging Face tensor on the owner, gathered from ``tensor`` of the tp ranks.

        ``tensor`` has the shape of the parameter. None means that this rank is not the owner.
        """
        if self.copies is not None and self.copies.rank() != self.owner // self.mesh.size():
            return None
        whole = full_hf_tensor(self.member, self.member.read(tensor.detach()), self.mesh)
        return whole if self.is_mine else None

    def distribute(self) -> None:
        self.spread(self.slot)

    @torch.no_grad()
    def spread(self, target: Tensor) -> None:
        """Copy the owner's weight into the slice ``member`` of ``target``; collective.

        ``target`` has the shape of the parameter. The weight is converted to the dtype of ``target``.
        """
        holder, first = divmod(self.owner, self.mesh.size())
        if self.copies is None or self.copies.rank() == holder:
            mine = self.parameter.detach() if self.is_mine else target.new_empty(self.shape)
            whole = mine.to(target.dtype)
            if self.mesh.size() > 1:
                dist.broadcast(whole, group=self.mesh.get_group(), group_src=first)
            part = whole[self.member.index].contiguous()
        else:
            part = self.member.read(target).clone(memory_format=torch.contiguous_format)
        if self.copies is not None and self.copies.size() > 1:
            dist.broadcast(part, group=self.copies, group_src=holder)
        self.member.write(target, part)


class WholeWeightUpdate(WholeWeightOptimizer):
    """An optimizer of full weights with the methods of ``MegatronOptimizers``.

    All ranks must make the same calls in the same order.
    """

    def __init__(
        self, description: Optimizer, blocks: HFTensorSlices, meshes: TPMeshes, *, divided: bool
    ) -> None:
        self.parts = {
            slot: [MegatronWeight(slot, m, meshes.of(m), divided=divided, number=number) for m in members]
            for number, (slot, members) in enumerate(blocks.items())
        }
        super().__init__(description, [weight for weights in self.parts.values() for weight in weights])
        self.device = torch.device(torch.cuda.current_device())
        # Sums over ranks count each gradient on one rank only, and tied ones once.
        self.counted = {
            slot: None
            for slot, (first, *_) in blocks.items()
            if first.primary and replicas(slot).rank() == 0 and (first.dim is not None or meshes.first(first))
        }

    def prepare(self) -> Tensor:
        """Return the L2 norm of the reduced gradients over all ranks, a float64 scalar."""
        return global_norm(gradients(self.counted), None, self.device)

    def count_zeros(self) -> int:
        return count_zeros(gradients(self.counted), None, self.device)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of ``parameter``. None means that another rank counts it."""
        return parameter.main_grad if parameter in self.counted else None  # type: ignore[attr-defined]

    def apply(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        clip(gradients(self.parts), grad_norm, max_grad_norm)
        self.step(lr)

    def zero_grad(self) -> None:
        """Do nothing: gradients are only in the buffers of Megatron's data parallelism."""

    def read(self, parameter: nn.Parameter, _: str) -> Tensor:
        """Return the fp32 master weights in the shape of ``parameter``.

        Collective over the ranks that hold ``parameter``: each of them gets the result.
        """
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        for weight in self.parts[parameter]:
            weight.spread(whole)
        return whole

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, _: str, whole: Tensor) -> None:
        """Set the parameter and the owners' master weights to ``whole``, which has the parameter's shape."""
        parameter.copy_(whole)
        for weight in self.parts[parameter]:
            if (gathered := weight.gathered(whole)) is not None:
                weight.parameter.data = gathered.clone(memory_format=torch.contiguous_format)

    def masters(self, *, written: bool) -> dict[str, Tensor]:
        """Return this rank's master weights, or only those that it writes, by checkpoint key."""
        weights = [weight for weight in self.owned if weight.writes or not written]
        return {f"model/{weight.name}": weight.parameter.detach() for weight in weights}

    @contextmanager
    def loading(self, saved: Mapping[str, torch.Size]) -> Iterator[dict[str, Tensor]]:
        with super().loading(saved) as state:
            yield state | self.masters(written=False)
        for weight in self.weights:
            weight.distribute()


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]
