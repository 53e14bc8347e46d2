"""Memory, speed and bandwidth of the device of a rank, from this machine or by name."""

import difflib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil
import torch

from components.contracts.device import DeviceKind
from components.contracts.errors import ConfigError
from components.preflight.estimates.data_sheets import GPUS, LONGEST_FIRST
from components.preflight.estimates.flops import peak_flops
from components.rank_info import GPU_SHARERS, MEMORY_SHARERS

UNITS = {"GIB": 2**30, "MIB": 2**20, "GB": 10**9}

GPU_MFU = 0.4
"""Assumed MFU on GPUs. Large runs on H100 reach 0.38 to 0.43 (Llama Team, 2024, table 4)."""
CPU_MFU = 0.5
NETWORK = 50e9
"""Bytes/s between nodes, with a 400 Gb/s adapter per GPU."""
HOST = 32e9
"""Bytes/s between a GPU and its host (PCIe 4 x16)."""
LOOPBACK = 1e9
"""Bytes/s between two gloo ranks of one machine."""
PER_NODE = 8
PROGRAM = 600 * 2**20
"""Bytes of a CPU process before its first tensor: Python, torch, transformers."""
GPU_PROGRAM = 3 * 2**29
"""Bytes of a GPU that are left for other things than tensors: the context of CUDA with all loaded kernels,
and the buffers of NCCL and cuBLAS."""


@dataclass(frozen=True)
class Device:
    """The device of one rank, or its part of a shared CPU."""

    name: str
    kind: DeviceKind
    memory: int
    """Bytes available for tensors."""
    certain: bool
    """Whether ``memory`` belongs to this rank only, as on a GPU, or was set by the user."""
    flops: float
    """Peak FLOP/s."""
    mfu: float
    """Assumed fraction of ``flops`` that a run reaches."""
    link: float
    """Bytes/s to another rank of the node."""
    network: float
    """Bytes/s to a rank of another node."""
    per_node: int
    host: int | None = None
    """Bytes of memory of this machine, which its ranks share. None means that it is not known, or that it is
    the memory of a CPU."""

    def shared_by(self, ranks: int) -> Self:
        """Return the device of a rank if ``ranks`` instead of ``per_node`` ranks share a CPU.

        A GPU, which is not shared, is returned unchanged.
        """
        if self.kind != "cpu" or ranks == self.per_node:
            return self
        whole = (self.memory + PROGRAM) * self.per_node
        memory = self.memory if self.certain else max(whole // ranks - PROGRAM, 0)
        return replace(self, memory=memory, flops=self.flops * self.per_node / ranks, per_node=ranks)


def find_device(
    kind: DeviceKind, name: str | None, memory: float | str | None, *, local_ranks: int, dtype: torch.dtype
) -> Device:
    """Return the device of a rank: the GPU ``name``, or one of ``local_ranks`` parts of this machine.

    None as ``name`` means this machine. ``memory`` replaces the size of the memory, unless it is None.

    Raises:
        ConfigError: if there is no data sheet of ``name``, or ``memory`` is not a size.
    """
    budget = None if memory is None else parse_size(str(memory))
    if name is not None:
        return named(name, budget, dtype)
    if kind != "cpu":
        module = torch.get_device_module(kind)
        here, total = module.get_device_name(0), module.get_device_properties(0).total_memory
        link = next((GPUS[known].link for known in LONGEST_FIRST if known in here), HOST)
        flops = peak_flops(torch.device(kind), dtype)
        sharers = int(os.environ.get(GPU_SHARERS, 1))
        held = budget or max(total // sharers - GPU_PROGRAM, 0)
        host = machine_memory()
        return Device(here, kind, held, True, flops, GPU_MFU, link, NETWORK, PER_NODE, host)
    share = machine_memory() // local_ranks - PROGRAM
    flops = peak_flops(torch.device("cpu"), dtype) / local_ranks
    shown = f"CPU, shared by {local_ranks}" if local_ranks > 1 else "CPU"
    held, certain = max(share, 0) if budget is None else budget, budget is not None
    return Device(shown, kind, held, certain, flops, CPU_MFU, LOOPBACK, LOOPBACK, local_ranks)


def named(name: str, budget: int | None, dtype: torch.dtype) -> Device:
    """Return the GPU ``name`` with the figures of its data sheet; this machine need not have such a GPU.

    ``budget`` is the memory to assume, in bytes. None means that of the data sheet. ``dtype`` selects the
    peak FLOP/s.

    Raises:
        ConfigError: if there is no data sheet of ``name``.
    """
    if name not in GPUS:
        near = difflib.get_close_matches(name.upper(), GPUS, n=1)
        known = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(GPUS))}."
        raise ConfigError(f"preflight.device_name: there is no data sheet of {name!r}; {known}")
    gpu = GPUS[name]
    flops = gpu.full if dtype == torch.float32 else gpu.half
    memory = gpu.memory * UNITS["GB"] if budget is None else budget
    return Device(name, "cuda", memory, True, flops, GPU_MFU, gpu.link, NETWORK, PER_NODE)


def parse_size(text: str) -> int:
    """Parse ``80GiB``, ``512MiB`` or ``80GB`` into bytes.

    Raises:
        ConfigError: (about preflight.device_memory) if the text has another form.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise ConfigError(f"preflight.device_memory: {text!r} is not a size; write 80GiB, 512MiB or 80GB.")
    return int(float(found[1]) * UNITS[found[2].upper()])


def machine_memory() -> int:
    """Return the bytes of memory that this process and its children may use, whether free or not.

    This is the memory of the machine, or the limit of the cgroup if that is lower, divided by the number of
    concurrent jobs of a sweep.
    """
    limits = [
        int(text)
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
        if Path(path).is_file() and (text := Path(path).read_text().strip()).isdigit()
    ]
    return min([psutil.virtual_memory().total, *limits]) // int(os.environ.get(MEMORY_SHARERS, 1))
