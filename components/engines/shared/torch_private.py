"""The private names of torch that engines use, collected in one file.

If a release of torch moves one of them, ``tests/unit/test_private_api.py`` fails and prints its name.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)

CHECKED = ">=2.11,<2.14"
"""The releases of torch with which this file was checked."""


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flatten ``mesh`` into one dimension called ``name``; collective."""
    return mesh._flatten(name)


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every process group of this process, including those of libraries."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def assert_async(condition: Tensor, message: str) -> None:
    """Check ``condition`` on its device, without making the host wait."""
    torch._assert_async(condition, message)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard, which shares memory with ``tensor``, outside of autograd."""
    shard = getattr(tensor, "_local_tensor", tensor)
    return getattr(shard, "_tensor", shard)  # unwraps torchao's tensor for an all-gather in float8


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors with the same storage, even if the storage was resized."""
    return local_shard(tensor).untyped_storage()._cdata


def traced_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ``group`` as a new tensor, in code that torch.compile traces.

    torch 2.11 would replace ``dist.all_reduce`` by a copy through which no gradient flows.
    """
    summed: Tensor = wait_tensor(all_reduce(tensor.contiguous(), "sum", group))
    return summed


def use_count(tensor: Tensor) -> int:
    """Return the number of C++ references to ``tensor``, including that of its Python object."""
    return tensor._use_count()  # type: ignore[attr-defined]


def clear_dtensor_caches() -> None:
    """Clear torch's caches of DTensor operations, which keep alive the device meshes of earlier runs.

    With gloo, each process group of a mesh has a thread that wakes a hundred times a second. The names of the
    caches differ between releases of torch.
    """
    for owner, name in (
        (debug, "_clear_python_sharding_prop_cache"),
        (debug, "_clear_fast_path_sharding_prop_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (getattr(_redistribute, "_gen_transform_infos", None), "cache_clear"),
        (getattr(MeshTopoInfo, "build_from_mesh", None), "cache_clear"),
        (getattr(ShardingPropagator, "_propagate_tensor_meta_cached", None), "cache_clear"),
    ):
        if hasattr(owner, name):
            getattr(owner, name)()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of ``module``'s own parameters, whose values callers may replace by plain tensors."""
    return module._parameters


def has_cpp_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler."""
    from torch._inductor import cpp_builder, exc  # here, because it takes seconds

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True


def has_fast_product(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices in ``dtype``, bf16 or fp16, on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


def has_run(root: FSDPModule) -> bool:
    """Return whether a forward pass of ``root`` has begun; FSDP marks the root module in the first one."""
    return root._get_fsdp_state()._is_root is not None


def reset_iteration(root: FSDPModule) -> None:
    """Reset the state of FSDP after a forward or backward pass that did not finish."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    top: Any = root._get_fsdp_state()  # torch before 2.13 has no public call
    for state in top._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        for group in _param_groups(state):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
    top._comm_ctx.post_forward_order.clear()
    top._state_ctx.iter_forward_root = None
    top._state_ctx.post_backward_final_callback_queued = False


def drop_unreduced(module: FSDPModule) -> None:
    """Drop the gradients that ``set_requires_gradient_sync(False)`` has accumulated in ``module``."""
    for group in _param_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state: any number since torch 2.13, at most one before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if groups is None else groups
