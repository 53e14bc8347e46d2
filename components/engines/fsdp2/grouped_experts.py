"""The experts of an MoE layer, stacked in two tensors and computed together, with expert parallelism.

With expert parallelism, a rank has E / ep experts. With tensor parallelism, it has a share of the
intermediate dimension of each of them, as it would of a dense MLP. FSDP shards these parts over the ranks
that hold the same experts.
"""

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from components.adapters import LoRA
from components.engines.fsdp2.mesh import (
    EXPERT,
    REPLICATE,
    SHARD,
    TENSOR,
    from_local_shard,
    local_shard,
    shard_slices,
)
from components.engines.fsdp2.param_views import ParamView
from components.engines.fsdp2.tensor_parallel import ReduceFromTP
from components.engines.fsdp2.token_dispatcher import AllToAll, Permute, inverse_permutation
from components.engines.shared.grouped_mm import ALIGNED, grouped_matmul, has_grouped_kernel, per_expert
from components.models.experts import BIAS, ExpertList, moe_blocks

KINDS = ("gate_proj", "up_proj", "down_proj")


class GroupedExperts(nn.Module):
    """Replacement of ``ExpertList``, called in the same way as transformers' experts.

    Its parameters are ``gate_up_proj`` ``[E / ep, 2 I / tp, H]`` (this rank's rows of gate_proj, then of
    up_proj) and ``down_proj`` ``[E / ep, H, I / tp]``, on the meta device until the sharded model is
    materialized.
    """

    def __init__(self, experts: ExpertList, mesh: DeviceMesh, name: str, activation: str) -> None:
        super().__init__()
        self.mesh, self.name, self.activation = mesh, name, ACT2FN[activation]
        self.adapter: ExpertAdapter | None = None
        gate, down = (experts[0].get_parameter(f"{kind}.weight") for kind in ("gate_proj", "down_proj"))
        self.ep = mesh.get_group(EXPERT) if EXPERT in (mesh.mesh_dim_names or ()) else None
        self.tp = mesh.get_group(TENSOR) if mesh[TENSOR].size() > 1 else None
        self.number = len(experts) // (1 if self.ep is None else self.ep.size())
        self.meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self.first = 0 if self.ep is None else self.ep.rank() * self.number
        self.rows, hidden = gate.shape[0] // mesh[TENSOR].size(), gate.shape[1]
        self.gate_up_proj = nn.Parameter(
            gate.new_empty(self.number, 2 * self.rows, hidden), requires_grad=gate.requires_grad
        )
        self.down_proj = nn.Parameter(
            down.new_empty(self.number, hidden, self.rows), requires_grad=down.requires_grad
        )

    @property
    def parts(self) -> int:
        """Number of parts into which ep and tp split each of the two parameters."""
        return (1 if self.ep is None else self.ep.size()) * self.mesh[TENSOR].size()

    def hidden_dimensions(self) -> dict[nn.Parameter, int]:
        """Return, by parameter, the dimension that neither expert nor tensor parallelism splits."""
        own = {self.gate_up_proj: 2, self.down_proj: 1}
        return own if self.adapter is None else own | self.adapter.outer_dimensions()

    # The number of rows per expert is known only at run time, so that compiling is useless.
    @torch.compiler.disable
    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return ``[T, H]``: for each token, the sum of its experts' outputs, weighted by ``weights``.

        ``hidden`` is ``[T, H]``; ``chosen``, the experts of each token (int64), and ``weights`` are
        ``[T, K]``. Collective over ep and over tp ranks. Ranks of ep have different tokens.
        """
        copies, experts = chosen.shape[1], chosen.reshape(-1)
        order = experts.argsort(stable=True)
        inverse = inverse_permutation(order)
        rows = Permute.apply(hidden, order, inverse, copies)
        size = self.number if self.ep is None else self.number * self.ep.size()
        # bincount would make the host wait for a GPU.
        loads = experts.new_zeros(size).index_add(0, experts, torch.ones_like(experts))
        out = self._compute(rows, loads) if self.ep is None else self._compute_elsewhere(rows, loads, self.ep)
        each = Permute.apply(out, inverse, order, 1).view(-1, copies, hidden.shape[1])
        total = (each * weights[..., None]).sum(1).to(hidden.dtype)
        return total if self.tp is None else ReduceFromTP.apply(total, self.tp)

    def _compute_elsewhere(self, rows: Tensor, loads: Tensor, ep: dist.ProcessGroup) -> Tensor:
        """Apply the experts of all ep ranks to ``rows``, sorted by expert: ``loads[e]`` rows for expert e.

        The result has the order of ``rows``.
        """
        found = torch.empty_like(loads)
        dist.all_to_all_single(found, loads, group=ep)
        give, take = torch.stack([n.view(ep.size(), -1).sum(1) for n in (loads, found)]).tolist()
        received = AllToAll.apply(rows, give, take, ep)
        # Rows are sorted by sender, then by expert; sort them by expert.
        own = torch.arange(self.number, device=found.device).repeat(ep.size())
        order = own.repeat_interleave(found, output_size=len(received)).argsort(stable=True)
        inverse = inverse_permutation(order)
        out = self._compute(Permute.apply(received, order, inverse, 1), found.view(ep.size(), -1).sum(0))
        answers: Tensor = AllToAll.apply(Permute.apply(out, inverse, order, 1), take, give, ep)
        return answers

    def _compute(self, rows: Tensor, loads: Tensor) -> Tensor:
        """Apply this rank's experts to ``rows`` ``[N, H]``, sorted by expert: ``loads[e]`` for expert e."""
        product = grouped_matmul if has_grouped_kernel(rows, self.rows) else per_expert
        gate, up = product(rows, self.gate_up_proj, loads).chunk(2, -1)
        gate, up = self._adapted(gate, rows, loads, "gate_proj"), self._adapted(up, rows, loads, "up_proj")
        inner = self.activation(gate) * up
        return self._adapted(product(inner, self.down_proj, loads), inner, loads, "down_proj")

    def _adapted(self, out: Tensor, rows: Tensor, loads: Tensor, kind: str) -> Tensor:
        """Return ``out``, the output of the layer ``kind`` for ``rows``, plus that of the layer's adapter."""
        factors = None if self.adapter is None else self.adapter.factors(kind)
        if self.adapter is None or factors is None:
            return out
        a, b = factors
        fits = has_grouped_kernel(rows, a.shape[1]) and out.shape[1] % ALIGNED == 0
        product = grouped_matmul if fits else per_expert
        return out + self.adapter.scaling * product(product(rows, a, loads), b, loads)

    # ---- names

    def members(self, leaf: str) -> Iterator[ParamView]:
        """Yield a view of each expert weight of which this rank has a shard in the parameter ``leaf``."""
        parameter = self.get_parameter(leaf)
        here = shard_slices(parameter)[0]
        by_hidden = parameter.placements[-1] != Shard(0) if isinstance(parameter, DTensor) else False
        dims = (REPLICATE, TENSOR, *((SHARD,) if by_hidden else ()))
        writes = all(self.mesh.get_local_rank(dim) == 0 for dim in dims)
        for place, number in enumerate(range(self.first + here.start, self.first + here.stop)):
            for kind, inside in self._inside(leaf).items():
                cut = partial(self._cut, by_hidden=by_hidden, down=kind == "down_proj", at=(place, inside))
                yield ParamView(f"{self.name}.{number}.{kind}.weight", parameter, cut, writes)

    def _inside(self, leaf: str) -> dict[str, slice]:
        if leaf == "down_proj":
            return {"down_proj": slice(None)}
        return {"gate_proj": slice(self.rows), "up_proj": slice(self.rows, None)}

    def _cut(self, tensor: Tensor, *, by_hidden: bool, down: bool, at: tuple[int, slice]) -> Tensor:
        """Return the matrix of one expert. FSDP may have split its hidden dimension, tp the other one."""
        local = local_shard(tensor)[at]
        cuts: dict[str, Shard] = {}
        if by_hidden:
            cuts[SHARD] = Shard(0 if down else 1)
        if self.tp is not None:
            cuts[TENSOR] = Shard(1 if down else 0)
        if not cuts:
            return local
        names = tuple(cuts)
        if names not in self.meshes:
            self.meshes[names] = self.mesh[names]
        return from_local_shard(local, self.meshes[names], list(cuts.values()))


def group_experts(model: PreTrainedModel, mesh: DeviceMesh, adapter: LoRA | None) -> None:
    """Replace the experts of ``model`` (on the meta device) by ``GroupedExperts`` over ``mesh``.

    ``GroupedExperts`` contain the LoRA factors that ``adapter`` adds to experts. Router biases become
    buffers, so that they are not optimized, sharded or cast.
    """
    targets = frozenset() if adapter is None else frozenset(adapter.targets(model))
    for name, block in moe_blocks(model).items():
        experts: Any = block.experts
        found = GroupedExperts(experts, mesh, f"{name}.experts", model.config.hidden_act)
        # ``LoRA.check`` has ensured that the same layers of all experts are adapted.
        kinds = [kind for kind in KINDS if f"{found.name}.0.{kind}" in targets]
        if adapter is not None and kinds:
            found.adapter = ExpertAdapter(kinds, adapter, found)
        block.experts = found
    for module in model.modules():
        if isinstance(bias := getattr(module, BIAS, None), nn.Parameter):
            delattr(module, BIAS)
            module.register_buffer(BIAS, bias.detach())


def bias_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the router biases of a model after ``group_experts``, by their names on disk."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{BIAS}")}


def grouped_experts(model: nn.Module) -> dict[str, GroupedExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedExperts)}


class ExpertAdapter(nn.Module):
    """LoRA factors of the experts of a layer.

    Each adapted projection has two factors, for example ``lora_A_gate_proj`` ``[E / ep, r, in]`` and
    ``lora_B_gate_proj`` ``[E / ep, out, r]``. This module is a submodule of the experts and is sharded with
    them. Tensor parallelism does not split it.
    """

    def __init__(self, kinds: Collection[str], adapter: LoRA, experts: GroupedExperts) -> None:
        """Create the factors of the layers ``kinds`` of ``experts``."""
        super().__init__()
        self.kinds, self.scaling = kinds, adapter.scaling
        self.name, self.mesh, self.first = experts.name, experts.mesh, experts.first
        self._disable_adapters = False
        """Whether the adapter is switched off, as in peft's layers: see ``adapters_off``."""
        number, hidden, rows = experts.down_proj.shape
        for kind in kinds:
            out, inside = (hidden, rows) if kind == "down_proj" else (rows, hidden)
            for name, shape in {"lora_A": (adapter.r, inside), "lora_B": (out, adapter.r)}.items():
                parameter = nn.Parameter(torch.empty(number, *shape, device="meta"))
                self.register_parameter(f"{name}_{kind}", parameter)

    def factors(self, kind: str) -> tuple[Tensor, Tensor] | None:
        """Return A and B of all experts. None means that ``kind`` is not adapted, or the adapter is off."""
        if kind not in self.kinds or self._disable_adapters:
            return None
        return self.get_parameter(f"lora_A_{kind}"), self.get_parameter(f"lora_B_{kind}")

    def outer_dimensions(self) -> dict[nn.Parameter, int]:
        """Return, by parameter, the dimension that is neither that of experts nor the LoRA rank."""
        return {p: 2 if name.startswith("lora_A") else 1 for name, p in self.named_parameters()}

    def members(self, leaf: str) -> Iterator[ParamView]:
        """Yield a view of each expert's factor of which this rank has a shard in the parameter ``leaf``."""
        parameter, (letter, kind) = self.get_parameter(leaf), (leaf[5], leaf[7:])
        whole = not isinstance(parameter, DTensor) or parameter.placements[-1] == Shard(0)
        writes = all(self.mesh.get_local_rank(dim) == 0 for dim in (REPLICATE, *(() if whole else (SHARD,))))
        here = shard_slices(parameter)[0]
        side = None if whole else Shard(1 if letter == "A" else 0)
        for place, number in enumerate(range(self.first + here.start, self.first + here.stop)):
            name = f"{self.name}.{number}.{kind}.lora_{letter}.weight"
            yield ParamView(name, parameter, partial(self._cut, place=place, side=side), writes)

    def _cut(self, tensor: Tensor, *, place: int, side: Shard | None) -> Tensor:
        """Return the matrix of one expert, one dimension of which FSDP may have split."""
        local = local_shard(tensor)[place]
        return local if side is None else from_local_shard(local, self.mesh[SHARD], [side])
