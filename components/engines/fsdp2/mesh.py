"""The ranks of a run as one mesh, and which of them holds what."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from components.contracts.json_types import Json
from components.engines.shared.torch_private import (
    DTensorSpec,
    TensorMeta,
    compute_local_shape_and_global_offset,
    local_tensor,
)

REPLICATE, SHARD, CONTEXT, EXPERT, TENSOR = "dp_replicate", "dp_shard", "cp", "ep", "tp"


def make_mesh(device: torch.device, *, dp_replicate: int, cp: int, tp: int) -> DeviceMesh:
    """All ranks as ``(dp_replicate, dp_shard, cp, tp)``; neighbours share every matrix."""
    sizes = (dp_replicate, dist.get_world_size() // (dp_replicate * cp * tp), cp, tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(REPLICATE, SHARD, CONTEXT, TENSOR))


def weight_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of ``mesh`` as parameters lie on them: those that share rows are shards like any others."""
    replicate, shard, cp, tp = mesh.shape
    if cp == 1:
        return mesh
    # Of its own, because torch deprecates taking a flattened dimension out of a mesh together with others.
    sizes = (replicate, shard * cp, tp)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """The ranks of ``mesh`` as experts lie on them: ``ep`` neighbours have other ones each."""
    if ep == 1:
        return weight_mesh(mesh)
    replicate, shard, cp, tp = mesh.shape
    sizes = (replicate, shard * cp // ep, ep, tp)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=(REPLICATE, SHARD, EXPERT, TENSOR))


def mesh_info(mesh: DeviceMesh) -> Json:
    """The size of every dimension, and the global rank at every place."""
    dims = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return {"dims": dims, "ranks": mesh.mesh.tolist()}


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What ``fully_shard`` takes: one dimension, or two where every shard has copies."""
    return mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, SHARD]


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, which shares memory with ``tensor``; autograd does not see it."""
    return local_tensor(tensor)


def shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole tensor; empty slices where it has none."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def is_primary_replica(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same shard: sums over ranks count it once."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor of other ranks"
    dims = zip(coordinate, tensor.placements, strict=True)
    return all(index == 0 for index, placement in dims if placement.is_replicate())


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank (a collective call)."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One dimension after the other, the innermost last: torch warns where it must find that out itself.
    *outer, last = tensor.placements
    return tensor.redistribute(placements=[*(Replicate() for _ in outer), last]).full_tensor()


def from_local_shard(local: Tensor, mesh: DeviceMesh, cuts: Sequence[Shard]) -> Tensor:
    """``local`` as this rank's part of a matrix that is cut evenly over the dimensions of ``mesh``."""
    shape = list(local.shape)
    for size, placement in zip(mesh.shape, cuts, strict=True):
        shape[placement.dim] *= size
    # Not by from_local, which moves what is offloaded to the device of the mesh: a copy that no one reads.
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), local.dtype)
    return DTensor(local.detach(), DTensorSpec(mesh, tuple(cuts), tensor_meta=meta), requires_grad=False)
