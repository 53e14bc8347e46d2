"""The device that a rank gets, of this machine or by name: its memory, its speed, its links."""

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import psutil
import torch

from components.contracts.errors import ConfigError
from components.preflight.estimates.flops import DENSE_PEAKS, peak_flops

UNITS = {"GIB": 2**30, "MIB": 2**20, "GB": 10**9}

GPUS = {
    "A100": (80, 300e9),
    "A10": (24, 32e9),
    "B200": (180, 900e9),
    "GH200": (96, 450e9),
    "H100 NVL": (94, 300e9),
    "H100 PCIe": (80, 300e9),
    "H100": (80, 450e9),
    "H200 NVL": (141, 450e9),
    "H200": (141, 450e9),
    "L4": (24, 32e9),
    "L40S": (48, 32e9),
    "RTX 3090": (24, 32e9),
    "RTX 4090": (24, 32e9),
    "RTX A6000": (48, 32e9),
}
"""Memory in GB and bytes a second to another GPU of the node, one way (NVLink, else PCIe 4 x16), from
NVIDIA's data sheets. A card reports a little more memory than its GB: that is left to CUDA and NCCL."""

GPU_MFU = 0.4
"""Reached in large runs on H100: 0.38 to 0.43 (Llama Team, 2024, table 4)."""
CPU_MFU = 0.5
NETWORK = 50e9
"""Bytes a second between nodes: a 400 Gb/s adapter for every GPU."""
HOST = 32e9
"""Bytes a second between a GPU and its host: PCIe 4 x16."""
LOOPBACK = 1e9
"""Bytes a second between two gloo ranks of one machine."""
PER_NODE = 8
PROGRAM = 600 * 2**20
"""Bytes of a process on a CPU before its first tensor: Python, torch, transformers."""


@dataclass(frozen=True)
class Device:
    """What one rank has."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory: int
    """Bytes that tensors may take."""
    certain: bool
    """Whether ``memory`` is this rank's alone: a GPU's, or as much as the user says."""
    flops: float
    """A second, at the best."""
    mfu: float
    """Assumed of a run: how much of ``flops`` it reaches."""
    link: float
    """Bytes a second to another rank of the node ..."""
    network: float
    """... and of another node."""
    per_node: int

    def shared_by(self, ranks: int) -> Self:
        """Of a CPU, which ``per_node`` ranks share, the part of each of ``ranks``; of a GPU, all of it."""
        if self.kind == "cuda" or ranks == self.per_node:
            return self
        whole = (self.memory + PROGRAM) * self.per_node
        memory = self.memory if self.certain else max(whole // ranks - PROGRAM, 0)
        return replace(self, memory=memory, flops=self.flops * self.per_node / ranks, per_node=ranks)


def find_device(
    kind: Literal["cpu", "cuda"],
    name: str | None,
    memory: float | str | None,
    *,
    local_ranks: int,
    dtype: torch.dtype,
) -> Device:
    """The device called ``name``, else what this machine has for each of ``local_ranks``.

    Raises:
        ConfigError: there is no such device in the data sheets, or ``memory`` is no size.
    """
    budget = None if memory is None else parse_size(str(memory))
    if name is not None:
        return named(name, budget, dtype)
    if kind == "cuda":
        here = torch.cuda.get_device_name(0)
        total = torch.cuda.get_device_properties(0).total_memory
        _, link = next((GPUS[known] for known in by_length(GPUS) if known in here), (0, HOST))
        flops = peak_flops(torch.device("cuda"), dtype)
        return Device(here, kind, budget or total, True, flops, GPU_MFU, link, NETWORK, PER_NODE)
    share = machine_memory() // local_ranks - PROGRAM
    flops = peak_flops(torch.device("cpu"), dtype) / local_ranks
    return Device(
        f"CPU, shared by {local_ranks}" if local_ranks > 1 else "CPU",
        kind,
        max(share, 0) if budget is None else budget,
        budget is not None,
        flops,
        CPU_MFU,
        LOOPBACK,
        LOOPBACK,
        local_ranks,
    )


def named(name: str, budget: int | None, dtype: torch.dtype) -> Device:
    """A GPU that need not be here."""
    if name not in GPUS:
        near = difflib.get_close_matches(name.upper(), GPUS, n=1)
        known = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(GPUS))}."
        raise ConfigError(f"preflight.device_name: there is no data sheet of {name!r}; {known}")
    gigabytes, link = GPUS[name]
    half, full = DENSE_PEAKS[name]
    flops = half if dtype == torch.bfloat16 else full
    memory = gigabytes * UNITS["GB"] if budget is None else budget
    return Device(name, "cuda", memory, True, flops, GPU_MFU, link, NETWORK, PER_NODE)


def by_length(names: dict[str, tuple[int, float]]) -> list[str]:
    return sorted(names, key=len, reverse=True)


def parse_size(text: str) -> int:
    """Bytes: ``80GiB``, ``512MiB``, ``80GB``.

    Raises:
        ConfigError: (about preflight.device_memory) anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise ConfigError(f"preflight.device_memory: {text!r} is no size; write 80GiB, 512MiB or 80GB.")
    return int(float(found[1]) * UNITS[found[2].upper()])


def machine_memory() -> int:
    """Bytes that this process and its children may take: the machine's, or what its control group allows."""
    limits = [
        int(text)
        for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
        if Path(path).is_file() and (text := Path(path).read_text().strip()).isdigit()
    ]
    return min([psutil.virtual_memory().total, *limits])
