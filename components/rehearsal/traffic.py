"""Collectives of a rank, by process group and kind."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from components.rehearsal.host_values import Arguments, HostValues


@dataclass(frozen=True)
class Exchange:
    """A kind of collective or send of this rank, for which ``Traffic`` counts calls and bytes."""

    collective: str
    """Name in ``c10d``: ``allreduce``, ``_allgather_base``, ``send`` and others."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str
    moment: str


@dataclass
class Traffic:
    """Collectives and sends of this rank: number of calls and bytes of their tensors, by kind of exchange."""

    calls: Counter[Exchange] = field(default_factory=Counter)
    num_bytes: Counter[Exchange] = field(default_factory=Counter)
    moment: str = "build"

    def add(self, collective: str, ranks: Sequence[int], args: Arguments) -> None:
        """Count a call. Its size is that of its inputs or of its outputs, whichever is larger."""
        tensors = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)] for value in args]
        first = next(tensor for each in tensors for tensor in each)
        moment = "backward" if is_pipeline_gradient(first) else self.moment
        exchange = Exchange(collective, tuple(ranks), str(first.dtype).removeprefix("torch."), moment)
        self.calls[exchange] += 1
        self.num_bytes[exchange] += max(sum(t.numel() * t.element_size() for t in each) for each in tensors)


def is_pipeline_gradient(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is sent to the previous pipeline stage, or received from the next one.

    Megatron does this after the backward pass of a stage, when no pass is running.
    """
    walked: FrameType | None = sys._getframe(1)
    while walked is not None and walked.f_code.co_name not in ("_p2p_ops", "_batched_p2p_ops"):
        walked = walked.f_back
    of = {} if walked is None else walked.f_locals
    return any(of.get(name) is tensor for name in ("tensor_send_prev", "tensor_recv_next"))


def group_of(args: Arguments) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a ``c10d`` operator."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def follow_values(values: HostValues, func: OpOverload, tensors: Sequence[Tensor], size: int) -> None:
    """Set the results of small integer exchanges as if each peer had sent what this rank sends."""
    name = func._schema.name.removeprefix("c10d::").rstrip("_")
    if name == "alltoall_base":
        if (sent := values.known(tensors[1])) is not None:
            values.set(tensors[0], sent.clone().view(tensors[0].shape))
    elif name == "_allgather_base":
        if (sent := values.known(tensors[1])) is not None:
            values.set(tensors[0], torch.cat([sent.reshape(-1)] * size).view(tensors[0].shape))
    elif name == "allgather" and (sent := values.known(tensors[-1])) is not None:
        for received in tensors[:-1]:
            values.set(received, sent.clone())
