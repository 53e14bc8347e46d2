"""Conversion between Hugging Face tensors and Megatron's parameters, in any layout.

The position of a parameter's rows is taken from Megatron's own ``sharded_state_dict``, so this module does
not depend on how layers are distributed over pipeline stages.
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
"""Shapes by name, as ``named_shapes`` of the Hugging Face model returns them."""


@dataclass(frozen=True)
class HFTensorSlice:
    """The part of one Hugging Face tensor that lies in one parameter of this rank.

    The parameter's rows form ``groups`` equal groups; the slice is rows ``start:stop`` of every group.
    """

    name: str
    shape: torch.Size
    """Shape of the full Hugging Face tensor, without the padding of the vocabulary."""
    index: tuple[slice, ...]
    """The range in every dimension of the Hugging Face tensor."""
    dim: int | None
    """The dimension that tensor parallelism splits, as ``torch.chunk`` does. None means replicated. Expert
    tensors are split over etp instead of tp."""
    groups: int
    start: int
    stop: int
    primary: bool
    """Whether the slice is saved and exported; a tied copy on another pipeline stage is only loaded."""
    expert: bool = False
    """Whether the slice belongs to an expert; the ranks of ``ep`` hold different experts."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return this slice's rows of ``tensor``, which has the shape of the parameter.

        ``tensor`` is the weight, master weight, a moment or the gradient of the parameter. The result shares
        memory with ``tensor`` if ``groups`` is 1, and is contiguous if ``tensor`` is.
        """
        return self._rows(tensor).flatten(0, 1)

    @torch.no_grad()
    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Copy ``value``, shaped like the result of ``read`` and of any dtype and device, into ``tensor``."""
        rows = self._rows(tensor)
        # Copied group by group: torch refuses to copy a view of several groups onto itself.
        for target, group in zip(rows, value.reshape(rows.shape), strict=True):
            target.copy_(group)

    def flat_chunks(self, shape: torch.Size, where: slice) -> Iterator[FlatChunk]:
        """Yield the parts of the Hugging Face tensor in the elements ``where`` of the flat parameter."""
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
    """Return the slices that every parameter of ``chunks`` (unwrapped) holds, without communication.

    Raise AssertionError unless every row, except vocabulary padding, is in exactly one slice, and the slices
    fit ``shapes``.
    """
    found: HFTensorSlices = {}
    for chunk in chunks:
        for parameter, tensors in sharded_parameters(chunk):
            assert parameter not in found, f"{tensors[0].key}: a parameter with two names"
            groups = chunk.config.num_query_groups
            for tensor in tensors:
                tensor.key = decoder_key(tensor.key, chunk.config.num_layers)
                if "score.weight" in shapes:
                    tensor.key = tensor.key.replace("output_layer", "score")
            found[parameter] = [b for t in tensors for b in tensor_slices(parameter, t, shapes, groups)]
            check_rows(parameter, tensors[0], found[parameter])
    assert found.keys() == {p for chunk in chunks for p in chunk.parameters()}, "a parameter without a name"
    return found


def sharded_parameters(chunk: GPTModel) -> Iterator[tuple[nn.Parameter, list[ShardedTensor]]]:
    """Yield every parameter with its tensors in a Megatron checkpoint, in the order of its rows."""
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
    """Return the slices of Hugging Face tensors that ``tensor`` holds; its rows are rows of ``parameter``."""
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
    """Return the slice of ``groups * rows`` rows of ``name`` from row ``offset`` on, without padding.

    ``parameter`` holds ``rows`` of these rows in each of ``groups`` groups, from row ``start`` of the group
    on.
    """
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
    # Megatron numbers replicas by (pipeline, tensor, data); the tied head on the last stage has pipeline 1.
    primary = tensor.replica_id[0] == 0
    place = (groups, start, start + rows)
    return HFTensorSlice(
        name, shape, tuple(index), split[0] if split else None, *place, primary, is_expert(parameter)
    )


def chunk_range(size: int, parts: int, rank: int) -> slice:
    """Return the slice of ``rank`` as in ``torch.chunk`` and DTensor's ``Shard``; the last may be short."""
    step = math.ceil(size / parts)
    return slice(min(rank * step, size), min((rank + 1) * step, size))


def check_rows(parameter: nn.Parameter, tensor: ShardedTensor, members: Sequence[HFTensorSlice]) -> None:
    """Assert that every row of ``parameter`` is in exactly one slice, or is padding that Megatron allows."""
    covered = torch.zeros(parameter.shape[0], dtype=torch.int64)
    for member in members:
        member.write(covered, member.read(covered) + 1)
    assert covered.max() <= 1, f"{tensor.key}: a row that is in two tensors"
    assert covered.min() == 1 or tensor.allow_shape_mismatch, f"{tensor.key}: a row that is in no tensor"


# ---- loading


def fill_parameters(found: HFTensorSlices, source: WeightSource) -> None:
    """Fill every parameter with its part of ``source``; only the parts that this rank holds are read."""
    for parameter, members in found.items():
        fill_parameter(parameter, members, source)


@torch.no_grad()
def fill_parameter(tensor: Tensor, members: Sequence[HFTensorSlice], source: WeightSource) -> None:
    """Fill one parameter, or its master weight, as in ``fill_parameters``; padding rows become zero."""
    tensor.zero_()
    for member in members:
        member.write(tensor, source(member.name, member.index))


# ---- export


def is_expert(parameter: Tensor) -> bool:
    """Return whether Megatron reduces the gradient over the ranks that hold the same experts."""
    return not getattr(parameter, "allreduce", True)


def replicas(parameter: Tensor) -> dist.ProcessGroup:
    """Return the ranks that hold the same parameter, each with a part of its gradient."""
    if is_expert(parameter):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


class TPMeshes:
    """The meshes of this rank over which ``HFTensorSlice.dim`` is split."""

    def __init__(self, device_type: str) -> None:
        dense = parallel_state.get_tensor_model_parallel_group()
        experts = parallel_state.get_expert_tensor_parallel_group()
        self.dense, self.experts = (DeviceMesh.from_group(g, device_type) for g in (dense, experts))

    def of(self, member: HFTensorSlice) -> DeviceMesh:
        return self.experts if member.expert else self.dense

    def first(self, member: HFTensorSlice) -> bool:
        """Return whether this rank writes ``member`` after all ranks of its mesh have gathered it."""
        return self.of(member).get_local_rank() == 0


def as_dtensor(member: HFTensorSlice, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return ``value``, shaped like ``member.read``, as this rank's part of the Hugging Face tensor.

    The result is a DTensor over ``mesh`` that shares memory with ``value``, or ``value`` itself if the slice
    is replicated. This function does not communicate.
    """
    if member.dim is None:
        return value
    stride = torch.empty(member.shape, device="meta").stride()
    placements = [Shard(member.dim)]
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=member.shape, stride=stride)


def full_hf_tensor(member: HFTensorSlice, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the Hugging Face tensor from the parts ``value`` of the ranks of ``mesh``; collective."""
    tensor = as_dtensor(member, value, mesh)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_hf_tensors(
    found: HFTensorSlices, meshes: TPMeshes, tensor_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors that this rank writes, tied ones once.

    Every rank must exhaust the iterator. Only the first of the ranks that hold the same parameters takes part
    in gathering, over ``meshes``, and only the first rank of each mesh writes. ``tensor_of``, which every
    rank calls for every parameter, returns the tensor to gather, in the parameter's shape: the weight itself,
    or its fp32 copy.
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
