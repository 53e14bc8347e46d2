"""LoRA beside the experts of a layer: an A and a B of every expert, stacked as the experts are."""

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from components.adapters import LoRA
from components.engines.fsdp2.mesh import REPLICATE, SHARD, distributed, part, stored
from components.engines.fsdp2.names import Member

KINDS = ("gate_proj", "up_proj", "down_proj")


def adapted_kinds(experts: str, targets: Collection[str]) -> tuple[str, ...]:
    """Which layers of the module called ``experts`` are adapted; ``LoRA.check`` has seen that its experts are
    alike."""
    return tuple(kind for kind in KINDS if f"{experts}.0.{kind}" in targets)


class ExpertAdapter(nn.Module):
    """``lora_A_gate_proj`` ``[E / ep, r, in]`` and ``lora_B_gate_proj`` ``[E / ep, out, r]``, and the like.

    Sharded with the experts, which it is a part of; ``tp`` does not split it.
    """

    def __init__(
        self,
        kinds: Collection[str],
        adapter: LoRA,
        *,
        name: str,
        mesh: DeviceMesh,
        first: int,
        down_shape: torch.Size,
    ) -> None:
        """Adds to the experts called ``name``, of which ``first`` is this rank's first.

        ``down_shape`` is that of their ``down_proj``.
        """
        super().__init__()
        self.kinds, self.scaling = kinds, adapter.scaling
        self.name, self.mesh, self.first = name, mesh, first
        self._disable_adapters = False
        """As peft's layers have it: see ``adapter.without_adapter``."""
        number, hidden, rows = down_shape
        for kind in kinds:
            out, inside = (hidden, rows) if kind == "down_proj" else (rows, hidden)
            for name, shape in {"lora_A": (adapter.r, inside), "lora_B": (out, adapter.r)}.items():
                parameter = nn.Parameter(torch.empty(number, *shape, device="meta"))
                self.register_parameter(f"{name}_{kind}", parameter)

    def factors(self, kind: str) -> tuple[Tensor, Tensor] | None:
        """A and B of every expert; None: there are none, or they are switched off."""
        if kind not in self.kinds or self._disable_adapters:
            return None
        return self.get_parameter(f"lora_A_{kind}"), self.get_parameter(f"lora_B_{kind}")

    def outer_dimensions(self) -> dict[nn.Parameter, int]:
        """By parameter, the dimension that is not the rank's, beside that of experts."""
        return {p: 2 if name.startswith("lora_A") else 1 for name, p in self.named_parameters()}

    def members(self, leaf: str) -> Iterator[Member]:
        """The factors of experts of which the parameter ``leaf``, sharded, has a part on this rank."""
        parameter, (letter, kind) = self.get_parameter(leaf), (leaf[5], leaf[7:])
        whole = not isinstance(parameter, DTensor) or parameter.placements[-1] == Shard(0)
        writes = all(self.mesh.get_local_rank(dim) == 0 for dim in (REPLICATE, *(() if whole else (SHARD,))))
        here = part(parameter)[0]
        side = None if whole else Shard(1 if letter == "A" else 0)
        for place, number in enumerate(range(self.first + here.start, self.first + here.stop)):
            name = f"{self.name}.{number}.{kind}.lora_{letter}.weight"
            yield Member(name, parameter, partial(self._cut, place=place, side=side), writes)

    def _cut(self, tensor: Tensor, *, place: int, side: Shard | None) -> Tensor:
        """The matrix of one expert, of which FSDP may have cut a side."""
        local = stored(tensor)[place]
        return local if side is None else distributed(local, self.mesh[SHARD], [side])
