"""Device meshes of the ranks, and the shards of tensors that each rank holds."""

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
)
from components.engines.shared.torch_private import local_shard as local_shard

REPLICATE, SHARD, CONTEXT, EXPERT, TENSOR = "dp_replicate", "dp_shard", "cp", "ep", "tp"


def make_mesh(device: torch.device, *, dp_replicate: int, cp: int, tp: int) -> DeviceMesh:
    """Return the mesh ``(dp_replicate, dp_shard, cp, tp)`` of all ranks; tp ranks are neighbours."""
    sizes = (dp_replicate, dist.get_world_size() // (dp_replicate * cp * tp), cp, tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(REPLICATE, SHARD, CONTEXT, TENSOR))


def weight_mesh(mesh: DeviceMesh, ep: int = 1) -> DeviceMesh:
    """Return the mesh for parameters: (dp_replicate, dp_shard x cp, tp), since cp ranks hold shards too.

    With ``ep`` above 1, return that for parameters of experts, which groups of ``ep`` neighbours split:
    (dp_replicate, dp_shard x cp / ep, ep, tp).
    """
    replicate, shard, cp, tp = mesh.shape
    if cp == ep == 1:
        return mesh
    # A new mesh, because torch deprecates slicing a flattened dimension together with others.
    experts = {EXPERT: ep} if ep > 1 else {}
    sizes = {REPLICATE: replicate, SHARD: shard * cp // ep, **experts, TENSOR: tp}
    return init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_info(mesh: DeviceMesh) -> Json:
    """Return the size of every dimension of ``mesh`` and the global rank at every coordinate."""
    dims = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return {"dims": dims, "ranks": mesh.mesh.tolist()}


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for ``fully_shard``: one dimension, or two if every shard has replicas."""
    return mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, SHARD]


def without_wrapper(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a plain shard in place of torchao's wrapper, if any; both share memory."""
    wrapped = isinstance(tensor, DTensor) and hasattr(tensor.to_local(), "_tensor")
    return placed_like(local_shard(tensor), tensor) if wrapped else tensor


def placed_like(shard: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor placed as ``whole`` whose local part is ``shard``; they share memory."""
    if not isinstance(whole, DTensor):
        return shard
    # from_local would copy offloaded tensors to the device of the mesh.
    meta = TensorMeta(whole.shape, whole.stride(), shard.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, tensor_meta=meta)
    return DTensor(shard.detach(), spec, requires_grad=False)


def shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of this rank's shard in the full tensor, empty ones if the rank has no shard."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def is_primary_replica(tensor: Tensor) -> bool:
    """Return whether this rank is the first that holds its shard, and counts it in sums over ranks."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor of other ranks"
    dims = zip(coordinate, tensor.placements, strict=True)
    return all(index == 0 for index, placement in dims if placement.is_replicate())


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # One dimension after the other, the innermost last, because torch warns if the order is not given.
    *outer, last = tensor.placements
    return tensor.redistribute(placements=[*(Replicate() for _ in outer), last]).full_tensor()


def from_local_shard(local: Tensor, mesh: DeviceMesh, cuts: Sequence[Shard]) -> Tensor:
    """Return a matrix as a DTensor whose shard on this rank is ``local``; they share memory.

    The matrix is split evenly over each dimension of ``mesh``, by the placement in ``cuts`` for it.
    """
    shape = list(local.shape)
    for size, placement in zip(mesh.shape, cuts, strict=True):
        shape[placement.dim] *= size
    # from_local would copy offloaded tensors to the device of the mesh, which is not needed.
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), local.dtype)
    return DTensor(local.detach(), DTensorSpec(mesh, tuple(cuts), tensor_meta=meta), requires_grad=False)
