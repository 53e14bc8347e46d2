"""The experts of a rank in Megatron's MoE layer, stacked in two parameters and computed together."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from components.contracts.device_copy import to_device
from components.engines.shared.grouped_mm import grouped_matmul, has_grouped_kernel, per_expert


class GroupedLinear(nn.Module):
    """One projection of E experts, with the interface of Megatron's parallel layers.

    ``weight`` is ``[E * out, in]``: the rows of the first expert's matrix, then of the next one's. The ranks
    of ``tp_group`` (etp) divide dimension ``split`` of each matrix. For fc1, whose matrices hold gate and
    then up, a rank has its rows of gate and then its rows of up.
    """

    loads: Tensor
    """Number of rows of each expert in the next call, int64 ``[E]``."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        experts: int,
        split: int,
        config: TransformerConfig,
        tp_group: dist.ProcessGroup,
        **_: object,
    ) -> None:
        super().__init__()
        self.experts, self.split, self.tp_group = experts, split, tp_group
        out, width = outputs, inputs
        if split == 0:
            out //= tp_group.size()
        else:
            width //= tp_group.size()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(experts * out, width, device=device, dtype=config.params_dtype)
        )
        set_tensor_model_parallel_attributes(self.weight, True, split, 1)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """Map ``[N, in]``, sorted by expert, to ``[N, out]``; the None is in place of a bias to be added."""
        stacked = self.weight.unflatten(0, (self.experts, -1))
        if has_grouped_kernel(rows, stacked.shape[1]):
            return grouped_matmul(rows, stacked, to_device(self.loads, rows.device)), None
        return per_expert(rows, stacked, self.loads), None

    def sharded(self, key: str, replica_id: ReplicaId, *, first: int, names: tuple[str, ...]) -> object:
        """Return the factory by which Megatron describes the stacked weight as tensors of single experts.

        ``key`` is a template of their keys, in which ``{expert}`` stands for the number of the expert;
        ``first`` is the number of this rank's first expert. Each matrix consists of ``len(names)`` equal
        parts, such as gate and up, and ``names`` are the suffixes of their keys.
        """

        def build(key: str, stacked: Tensor, replica_id: ReplicaId, _: object) -> list[ShardedTensor]:
            split = (self.split, self.tp_group.rank(), self.tp_group.size())
            parts = stacked.detach().chunk(self.experts * len(names))
            keys = (key.format(expert=first + n) + name for n in range(self.experts) for name in names)
            describe = partial(ShardedTensor.from_rank_offsets, replica_id=replica_id)
            return [describe(key, part, split) for key, part in zip(keys, parts, strict=True)]

        return ShardedTensorFactory(key, self.weight, build, torch.cat, replica_id)


class GroupedExperts(SequentialMLP):
    """All experts of this rank as one MLP, whereas ``SequentialMLP`` calls one MLP per expert.

    Each projection stacks the matrices of all experts. Megatron's own grouped experts need
    transformer-engine, or the package grouped_gemm, which is no longer maintained.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: ProcessGroupCollection
    ) -> None:
        fc1, fc2 = (
            ModuleSpec(GroupedLinear, params={"experts": num_local_experts, "split": split})
            for split in (0, 1)
        )
        super().__init__(1, config, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2), pg_collection)
        self.first = self.ep_group.rank() * num_local_experts

    def projections(self) -> Iterator[tuple[str, GroupedLinear]]:
        (mlp,) = self.local_experts
        yield "linear_fc1", mlp.linear_fc1
        yield "linear_fc2", mlp.linear_fc2

    def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Apply the experts to ``rows`` ``[N, H]``, sorted by expert, and multiply by ``probs`` ``[N]``."""
        for _, projection in self.projections():
            projection.loads = tokens_per_expert
        out, bias = super().forward(rows, tokens_per_expert, probs)
        return out, bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[()] = (), **_: object
    ) -> dict[str, object]:
        """Return the same tensors as ``SequentialMLP`` with separate keys for every expert."""
        assert not sharded_offsets, "layers have keys of their own (non_homogeneous_layers)"
        replica_id = (0, 0, self.dp_group.rank())
        found = {}
        for name, projection in self.projections():
            key = f"{prefix}experts.{{expert}}.{name}.weight"
            parts = ("_w", "_v") if name == "linear_fc1" else ("",)
            # The name in ``state_dict`` is used, because Megatron's MTP block lists parameters by these names
            # first.
            found[f"{prefix}local_experts.0.{name}.weight"] = projection.sharded(
                key, replica_id, first=self.first, names=parts
            )
        return found
