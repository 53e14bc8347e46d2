"""Keeping what pipeline stages send until it is sent, on any device.

The interleaved schedule replaces the data of a sent tensor before it waits for the transfer. Gloo still reads
the tensor from another thread, and NCCL from another stream, so the receiver could get what is written there
next. Newer releases of megatron-core wait: https://github.com/NVIDIA/Megatron-LM/pull/4047
"""

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from components.engines.megatron.compat.patching import Patch


def keep_sent_tensors(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def send_aliases(**tensors: object) -> object:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if isinstance(tensor := tensors[name], Tensor):
                tensors[name] = tensor.detach()
        return original(**tensors)

    return send_aliases


PATCHES = (
    Patch(
        symbols=("megatron.core.pipeline_parallel.p2p_communication._p2p_ops",),
        why="sends the schedule's own tensors, whose data the schedule replaces before they are sent",
        replace=keep_sent_tensors,
    ),
)
