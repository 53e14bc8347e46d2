"""The update by an optimizer of whole weights, such as Muon, in place of Megatron's own optimizers.

Gradients are summed over data ranks as for them. The owner of a Hugging Face tensor keeps its master weights
and its state, and gathers its gradient over tensor-parallel ranks. With the distributed optimizer, data ranks
divide the weights among them; without it, each of them updates all weights.
"""

from collections.abc import Iterator, Sequence
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
from components.engines.shared.loss_accumulator import global_norm
from components.engines.shared.whole_weights import OwnedWeight, WholeWeightOptimizer
from components.optimizers import Optimizer


class MegatronWeight(OwnedWeight):
    """A Hugging Face tensor, of which this rank has ``member``. Its owner keeps the master weights."""

    def __init__(
        self, parameter: nn.Parameter, member: HFTensorSlice, mesh: DeviceMesh, *, divided: bool, number: int
    ) -> None:
        self.slot, self.member, self.mesh = parameter, member, mesh
        copies = replicas(parameter)
        self.copies = copies if divided else None
        place, sharers = mesh.get_local_rank(), mesh.size()
        if divided:
            place, sharers = place + sharers * copies.rank(), sharers * copies.size()
        super().__init__(member.name, member.shape, parameter.device, place=place, sharers=sharers)
        self.writes = member.primary and (divided or number % copies.size() == copies.rank())

    def keep(self, whole: Tensor) -> None:
        """Set the owner's master weights from the parameters ``whole`` of all ranks."""
        if (gathered := self._gathered(whole)) is not None:
            self.parameter.data = gathered.float().clone(memory_format=torch.contiguous_format)

    def gather(self) -> None:
        self.parameter.grad = self._gathered(self.slot.main_grad)  # type: ignore[attr-defined]

    def distribute(self) -> None:
        self.spread(self.slot)

    @torch.no_grad()
    def spread(self, target: Tensor) -> None:
        """Copy the owner's value into the block of ``target``, shaped as the parameter, in its dtype."""
        holder, first = divmod(self.owner, self.mesh.size())
        if self.copies is None or self.copies.rank() == holder:
            whole = self.parameter.detach().to(target.dtype) if self.is_mine else self._empty(target)
            if self.mesh.size() > 1:
                dist.broadcast(whole, group=self.mesh.get_group(), group_src=first)
            part = whole[self.member.index].contiguous()
        else:
            part = torch.empty_like(self.member.read(target), memory_format=torch.contiguous_format)
        if self.copies is not None and self.copies.size() > 1:
            dist.broadcast(part, group=self.copies, group_src=holder)
        self.member.write(target, part)

    def _empty(self, target: Tensor) -> Tensor:
        return torch.empty(self.shape, dtype=target.dtype, device=target.device)

    def _gathered(self, tensor: Tensor) -> Tensor | None:
        """Return the Hugging Face tensor on the owner, gathered over its tensor-parallel ranks."""
        if self.copies is not None and self.copies.rank() != self.owner // self.mesh.size():
            return None
        whole = full_hf_tensor(self.member, self.member.read(tensor.detach()), self.mesh)
        return whole if self.is_mine else None


class WholeWeightUpdate:
    """What ``MegatronOptimizers`` is for Megatron's optimizers. All ranks make every call together."""

    def __init__(
        self,
        description: Optimizer,
        blocks: HFTensorSlices,
        meshes: TPMeshes,
        device: torch.device,
        *,
        divided: bool,
    ) -> None:
        self.device = device
        self.weights = {
            parameter: [
                MegatronWeight(parameter, member, meshes.of(member), divided=divided, number=number)
                for member in members
            ]
            for number, (parameter, members) in enumerate(blocks.items())
        }
        every = [weight for weights in self.weights.values() for weight in weights]
        self.optimizer = WholeWeightOptimizer(description, every)

    # ---- one step

    def prepare(self) -> Tensor:
        """Return the L2 norm of the reduced gradients over all ranks, a float64 scalar."""
        world = dist.group.WORLD
        assert world is not None
        return global_norm(self._counted(), world, self.device)

    def apply(self, lr: float, grad_norm: float, max_grad_norm: float | None) -> None:
        gradients = self._gradients(list(self.weights))
        if max_grad_norm and gradients:
            torch._foreach_mul_(gradients, min(max_grad_norm / (grad_norm + 1e-6), 1.0))
        self.optimizer.step(lr)

    def count_zeros(self) -> int:
        zeros = torch.zeros((), dtype=torch.int64, device=self.device)
        for gradient in self._counted():
            zeros += (gradient == 0).sum()
        dist.all_reduce(zeros)
        return int(zeros.item())

    def zero_grad(self) -> None:
        """Do nothing: gradients are only in the buffers of Megatron's data parallelism."""

    # ---- state

    def read(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """Return the master weights of the parameter, in its shape, on every rank that holds it."""
        assert kind == "model", f"{kind} is on the owner only"
        whole = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        for weight in self.weights[parameter]:
            weight.spread(whole)
        return whole

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, kind: str, whole: Tensor) -> None:
        """Set the parameter and the master weights of the owners."""
        assert kind == "model", f"{kind} is on the owner only"
        parameter.copy_(whole)
        for weight in self.weights[parameter]:
            weight.keep(whole)

    def tensors(self, *, model_only: bool) -> dict[str, Tensor]:
        """Return the tensors that this rank writes, by key of a checkpoint."""
        written = [weight for weight in self.optimizer.owned if weight.writes]
        masters = {f"model/{weight.name}": weight.parameter.detach() for weight in written}
        return masters if model_only else masters | self.optimizer.tensors()

    @contextmanager
    def loading(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors to read from a checkpoint in place, and distribute the weights at the end."""
        masters = {f"model/{weight.name}": weight.parameter.detach() for weight in self.optimizer.owned}
        with self.optimizer.loading() as state:
            yield masters | state
        for weight in self.optimizer.weights:
            weight.distribute()

    # ---- private

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [parameter.main_grad for parameter in parameters]  # type: ignore[attr-defined]

    def _counted(self) -> list[Tensor]:
        """Return the gradients for sums over ranks, each of them on one rank only, tied ones once."""
        first = []
        for parameter, (weight, *_) in self.weights.items():
            alone = weight.member.dim is not None or weight.mesh.get_local_rank() == 0
            if weight.member.primary and alone and replicas(parameter).rank() == 0:
                first.append(parameter)
        return self._gradients(first)
