"""CPU patches for the token exchange of Megatron's MoE layers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps

import torch
import torch.distributed as dist
from torch import Tensor

from components.engines.megatron.compat.patching import Patch


class TorchInOrder:
    """A substitute for ``torch`` in one module of Megatron; its only stream runs everything in order."""

    def __init__(self, _: object) -> None:
        self.cuda = CudaInOrder()

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


class CudaInOrder:
    def Stream(self) -> "SingleStream":
        return SingleStream()

    current_stream = Stream

    def stream(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


class SingleStream:
    """A stream and an event in one; all work is finished when it is issued, so waiting does nothing."""

    def wait_stream(self, _: "SingleStream") -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> "SingleStream":
        return self


def as_numbers(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def move(tensor: object, as_numpy: bool = False, **_: object) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    return move


def gather_any(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def gather(
        input_: Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original(input_, group, output_split_sizes, use_global_buffer)
        # An all-to-all that sends the whole input to every rank, because sizes differ between ranks.
        ranks, received = group.size(), list(output_split_sizes)
        out = input_.new_empty(sum(received), *input_.shape[1:])
        copies = torch.cat([input_] * ranks)
        dist.all_to_all_single(out, copies, received, [len(input_)] * ranks, group=group)
        return out

    return gather


PATCHES = (
    Patch(
        symbols=(
            "megatron.core.transformer.moe.token_dispatcher.torch",
            "megatron.core.transformer.moe.shared_experts.torch",
        ),
        why="makes streams, and waits for them",
        replace=TorchInOrder,
    ),
    Patch(
        symbols=("megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",),
        why="makes numbers of split sizes on their way from a GPU only",
        replace=as_numbers,
    ),
    Patch(
        symbols=("megatron.core.tensor_parallel.mappings._gather_along_first_dim",),
        why="gloo gathers no parts of different sizes",
        replace=gather_any,
    ),
)
