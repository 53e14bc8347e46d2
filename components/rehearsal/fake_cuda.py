"""Replacements of the functions of ``torch.cuda`` for a fake GPU, for the rest of the process."""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor

from components.preflight.estimates.data_sheets import GPUS, LONGEST_FIRST
from components.rehearsal.mode import RehearsalMode

GPU = torch.device("cuda", 0)
HOPPER = (9, 0)

NOTHING = (
    "set_device",
    "_lazy_init",
    "init",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "set_rng_state",
    "set_stream",
    "ipc_collect",
    "reset_max_memory_allocated",
)
"""Functions of ``torch.cuda`` whose replacements do nothing."""


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rehearsal imitates."""

    name: str
    memory: int
    """Size of the memory in bytes."""

    @property
    def capability(self) -> tuple[int, int]:
        return next((GPUS[known].capability for known in LONGEST_FIRST if known in self.name), HOPPER)


class FakeStream:
    """A stream of the fake GPU, on which all work is done as soon as it is issued."""

    device, cuda_stream, stream_id, device_index, device_type = GPU, 0, 0, 0, 1
    on_wait: Callable[[str], None]

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: Self) -> None: ...
    def wait_event(self, _: "Event") -> None: ...
    def synchronize(self) -> None:
        type(self).on_wait("stream.synchronize")

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class Event:
    """An event of the fake GPU, which is always complete."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None:
        type(self).on_wait("event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Self) -> float:
        return 1.0


def install(gpu: Gpu, mode: RehearsalMode) -> None:
    """Make ``torch.cuda`` that of a node with eight fake ``gpu``, whose waits and memory ``mode`` records."""
    cuda: Any = torch.cuda
    FakeStream.on_wait = Event.on_wait = mode.waits.wait
    stream = FakeStream()
    answers: dict[str, object] = {
        **dict.fromkeys(NOTHING, None),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        "is_current_stream_capturing": False,
        "current_device": 0,
        "device_count": 8,
        "get_device_properties": properties(gpu),
        "get_device_name": gpu.name,
        "get_device_capability": gpu.capability,
        "current_stream": stream,
        "default_stream": stream,
        "initial_seed": 0,
        "mem_get_info": (gpu.memory, gpu.memory),
        "memory_stats": defaultdict(int),
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "get_arch_list": ["sm_{}{}".format(*gpu.capability)],
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda.synchronize = lambda *_, **__: mode.waits.wait("cuda.synchronize")
    cuda.memory_allocated = lambda *_, **__: mode.memory.now
    cuda.max_memory_allocated = lambda *_, **__: mode.memory.peak
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.Stream = cuda.ExternalStream = FakeStream
    cuda.Event = Event
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.random.set_rng_state = lambda *_, **__: None
    cuda.default_generators = (torch.default_generator,) * 8
    torch.accelerator.reset_peak_memory_stats = lambda *_, **__: None
    # FSDP asks it for weights that no block has used.
    torch.accelerator.current_stream = lambda *_, **__: stream  # type: ignore[assignment]
    torch.accelerator.synchronize = lambda *_, **__: mode.waits.wait("accelerator.synchronize")
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    F.scaled_dot_product_attention = efficient_attention
    torch.version.cuda = torch.version.cuda or "12.8"
    fake_tensor.init_gpu_context = lambda *_: None  # type: ignore[assignment]
    torch._C._set_only_lift_cpu_tensors(True)
    # The CPU build lacks it, and bitsandbytes, which peft imports if it is installed, looks for it.
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # type: ignore[assignment]


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call torch's memory-efficient kernel, which a GPU has for all dtypes.

    torch's own selection of a kernel needs the driver. In a build without CUDA, it selects the kernel whose
    memory grows with the square of the length.
    """
    assert not enable_gqa, "the kernel of linear memory has no GQA"
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    result: Tensor = attend(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return result


def properties(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.memory,
        major=major,
        minor=minor,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
