"""Hugging Face tensors in and out of Megatron's parameters, in any layout.

Where a parameter's rows belong is read off Megatron's own ``sharded_state_dict``, so nothing here knows how
layers are spread over pipeline stages.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from components.checkpoint.flat_shard import FlatChunk, flat_chunks
from components.engines.megatron.hf_names import decoder_key, hf_names
from components.models import WeightSource

Shapes = Mapping[str, torch.Size]
"""``named_shapes`` of the Hugging Face model: name -> shape."""


@dataclass(frozen=True)
class HFTensorSlice:
    """The part of one Hugging Face tensor that lies in one parameter of this rank.

    The parameter's rows fall into ``groups`` equal groups; the block is rows ``start:stop`` of every group.
    """

    name: str
    shape: torch.Size
    """Of the whole Hugging Face tensor: the padding of the vocabulary is left out."""
    index: tuple[slice, ...]
    """Which part of the whole it is, in every dimension."""
    dim: int | None
    """The dimension that tensor parallelism splits, as ``torch.chunk`` does; None: no rank lacks any. That
    of experts is over ranks of its own (``etp``)."""
    groups: int
    start: int
    stop: int
    primary: bool
    """False: a tied copy on another pipeline stage, which is loaded but never saved, exported or counted."""
    expert: bool = False
    """Whether it is of an expert, which ranks of ``ep`` have others of."""

    def read(self, tensor: Tensor) -> Tensor:
        """The block of ``tensor``, which has the parameter's shape: weight, main copy, moment or gradient.

        It shares memory with ``tensor`` if ``groups`` is 1, and is contiguous if ``tensor`` is.
        """
        return self._rows(tensor).flatten(0, 1)

    @torch.no_grad()
    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copies ``value`` (what ``read`` gave, or shaped like it; any dtype and device) into ``tensor``."""
        rows = self._rows(tensor)
        # One by one: torch refuses to copy a view of several groups onto itself.
        for target, group in zip(rows, value.reshape(rows.shape), strict=True):
            target.copy_(group)

    def flat_chunks(self, shape: torch.Size, where: slice) -> Iterator[FlatChunk]:
        """What elements ``where`` of a flattened tensor of the parameter's ``shape`` are in the whole."""
        columns, height, rows = math.prod(shape[1:]), shape[0] // self.groups, self.stop - self.start
        for group in range(self.groups):
            first = (group * height + self.start) * columns
            begin = max(first, where.start)
            origin = [part.start for part in self.index]
            origin[0] += group * rows
            yield from flat_chunks(
                begin - first,
                min(first + rows * columns, where.stop) - first,
                columns,
                origin=origin,
                start=begin - where.start,
            )

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.groups, -1))[:, self.start : self.stop]


HFTensorSlices = dict[nn.Parameter, list[HFTensorSlice]]


def hf_slices(chunks: Sequence[GPTModel], shapes: Shapes) -> HFTensorSlices:
    """What every parameter of ``chunks`` (unwrapped) consists of. No communication.

    Asserts that every row, but for the padding of the vocabulary, belongs to one block that fits ``shapes``.
    """
    found: HFTensorSlices = {}
    for chunk in chunks:
        for parameter, tensors in sharded_parameters(chunk):
            assert parameter not in found, f"{tensors[0].key}: a parameter with two names"
            groups = chunk.config.num_query_groups
            for tensor in tensors:
                tensor.key = decoder_key(tensor.key, chunk.config.num_layers)
            found[parameter] = [b for t in tensors for b in tensor_slices(parameter, t, shapes, groups)]
            check_rows(parameter, tensors[0], found[parameter])
    assert found.keys() == {p for chunk in chunks for p in chunk.parameters()}, "a parameter without a name"
    return found


def sharded_parameters(chunk: GPTModel) -> Iterator[tuple[nn.Parameter, list[ShardedTensor]]]:
    """Every parameter and, in the order of its rows, the tensors that a Megatron checkpoint makes of it."""
    metadata = {
        "singleton_local_shards": True,  # gate and up get keys of their own
        "non_homogeneous_layers": True,  # keys hold the layer's number
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    for item in nested_values(chunk.sharded_state_dict(metadata=metadata)):
        if isinstance(item, ShardedTensorFactory):
            yield item.data, list(nested_values(item.build()))
        elif isinstance(item, ShardedTensor):
            yield item.data, [item]


def tensor_slices(
    parameter: nn.Parameter, tensor: ShardedTensor, shapes: Shapes, query_groups: int
) -> list[HFTensorSlice]:
    """The Hugging Face tensors of ``tensor``, which is some rows of ``parameter``."""
    names = hf_names(tensor.key)
    rows, offset = tensor.local_shape[0], tensor.global_offset[0]
    first = (tensor.data.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
    if len(names) == 1:
        return [
            hf_slice(names[0], parameter, tensor, shapes, offset=offset, groups=1, start=first, rows=rows)
        ]
    widths = [shapes[name][0] // query_groups for name in names]
    groups, before = rows // sum(widths), offset // sum(widths)
    assert first == 0, f"{tensor.key}: query groups that begin within a parameter"
    assert rows == groups * sum(widths), f"{tensor.key}: {rows} rows are no whole query groups of {widths}"
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [
        hf_slice(
            name, parameter, tensor, shapes, offset=before * width, groups=groups, start=start, rows=width
        )
        for name, start, width in zip(names, starts, widths, strict=True)
    ]


def hf_slice(
    name: str,
    parameter: Tensor,
    tensor: ShardedTensor,
    shapes: Shapes,
    *,
    offset: int,
    groups: int,
    start: int,
    rows: int,
) -> HFTensorSlice:
    """``groups`` times ``rows`` rows of the Hugging Face tensor, from its row ``offset``; padding is cut."""
    assert name in shapes, f"{tensor.key}: the model has no {name}"
    shape = shapes[name]
    rows = min(rows, max(shape[0] - offset, 0))
    index = [slice(o, o + n) for o, n in zip(tensor.global_offset, tensor.local_shape, strict=True)]
    index[0] = slice(min(offset, shape[0]), min(offset, shape[0]) + groups * rows)
    split = [dim for dim, parts in enumerate(tensor.axis_fragmentations) if parts > 1]
    assert len(split) <= 1, f"{tensor.key} is split in dimensions {split}"
    for dim, (size, parts) in enumerate(zip(shape, tensor.axis_fragmentations, strict=True)):
        rank = tensor.global_offset[dim] // tensor.local_shape[dim]
        assert index[dim] == chunk_range(size, parts, rank), f"{tensor.key}: not the {name} of DTensor"
    # Megatron numbers replicas by (pipeline, tensor, data): the tied head on the last stage is pipeline's 1.
    primary = tensor.replica_id[0] == 0
    place = (groups, start, start + rows)
    return HFTensorSlice(
        name, shape, tuple(index), split[0] if split else None, *place, primary, is_expert(parameter)
    )


def chunk_range(size: int, parts: int, rank: int) -> slice:
    """What ``torch.chunk``, and so DTensor's ``Shard``, gives to ``rank``: the last may get less, or none."""
    step = math.ceil(size / parts)
    return slice(min(rank * step, size), min((rank + 1) * step, size))


def check_rows(parameter: nn.Parameter, tensor: ShardedTensor, members: Sequence[HFTensorSlice]) -> None:
    """Every row of ``parameter`` is in one block; padding (Megatron marks what may have it) in none."""
    covered = torch.zeros(parameter.shape[0], dtype=torch.int64)
    for member in members:
        member.write(covered, member.read(covered) + 1)
    assert covered.max() <= 1, f"{tensor.key}: a row that is in two tensors"
    assert covered.min() == 1 or tensor.allow_shape_mismatch, f"{tensor.key}: a row that is in no tensor"


# ---- in


def load_weights(found: HFTensorSlices, source: WeightSource) -> None:
    """Fills every parameter with its part of ``source``; a rank asks for nothing that it does not hold."""
    for parameter, members in found.items():
        fill_parameter(parameter, members, source)


@torch.no_grad()
def fill_parameter(tensor: Tensor, members: Sequence[HFTensorSlice], source: WeightSource) -> None:
    """As ``load_weights`` for one parameter, or for its main copy; rows of padding become zero."""
    tensor.zero_()
    for member in members:
        member.write(tensor, source(member.name, member.index))


# ---- out


def is_expert(parameter: Tensor) -> bool:
    """Whether Megatron reduces its gradient over the ranks that hold the same experts."""
    return not getattr(parameter, "allreduce", True)


def replicas(parameter: Tensor) -> dist.ProcessGroup:
    """The ranks that hold the same parameter, and each found a part of its gradient."""
    if is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@dataclass(frozen=True)
class TPMeshes:
    """The ranks that ``Block.dim`` is split over."""

    dense: DeviceMesh
    experts: DeviceMesh

    @classmethod
    def of_rank(cls, device_type: str) -> "TPMeshes":
        return cls(
            DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), device_type),
            DeviceMesh.from_group(parallel_state.get_expert_tensor_parallel_group(), device_type),
        )

    def of(self, member: HFTensorSlice) -> DeviceMesh:
        return self.experts if member.expert else self.dense

    def first(self, member: HFTensorSlice) -> bool:
        """Whether this rank speaks for those that hold the whole of ``member``, once it was gathered."""
        return self.of(member).get_local_rank() == 0


def as_dtensor(member: HFTensorSlice, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """``value`` (shaped like ``member.read``) as this rank's part of the Hugging Face tensor.

    A DTensor over ``mesh`` that shares memory with ``value``, or ``value`` itself where every rank has the
    whole. No communication.
    """
    if member.dim is None:
        return value
    stride = torch.empty(member.shape, device="meta").stride()
    placements = [Shard(member.dim)]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=member.shape, stride=stride)


def full_hf_tensor(member: HFTensorSlice, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The Hugging Face tensor that every rank of ``mesh`` gives its part ``value`` of; collective."""
    tensor = as_dtensor(member, value, mesh)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_hf_tensors(
    found: HFTensorSlices, meshes: TPMeshes, tensor_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that this rank writes, tied ones once; every rank consumes it.

    Of the ranks that hold the same parameters the first gather them, over ``meshes``, and of those the first
    write. ``tensor_of``, which every rank calls of every parameter, gives what is gathered, in its shape: the
    weight itself, or its fp32 copy.
    """
    for parameter, members in found.items():
        tensor = tensor_of(parameter).detach()
        if replicas(parameter).rank() != 0:
            continue
        for member in members:
            if member.primary:
                gathered = full_hf_tensor(member, member.read(tensor), meshes.of(member))
                if meshes.first(member):
                    yield member.name, gathered
