"""Checks of the device of a run, and of its ranks on this machine."""

from typing import Literal, cast

import torch

from components.accelerator import UNSUPPORTED, find_accelerator
from components.contracts.device import DeviceKind
from components.contracts.errors import ConfigError
from components.contracts.parallelism import ParallelismSpec
from components.engines.megatron import Megatron
from components.engines.megatron.float8 import RECIPES
from components.preflight.estimates.data_sheets import GPUS
from components.preflight.estimates.device_specs import PROGRAM, machine_memory


def resolve_device(device: Literal["auto", DeviceKind], name: str | None = None) -> DeviceKind:
    """Resolve ``auto`` to ``cuda`` if ``name`` is given, else to this machine's accelerator, else to ``cpu``.

    ``name`` is the GPU of a forecast, which need not be in this machine.

    Raises:
        ConfigError: if ``device`` is not available here, or is not CUDA although a GPU is named.
    """
    if name is not None:
        if device not in ("auto", "cuda"):
            raise ConfigError(
                f"preflight.device_name: {name} is a GPU, and run.device={device}; use run.device=auto."
            )
        return "cuda"
    if device in UNSUPPORTED:
        raise ConfigError(f"run.device: {device} does not train ({UNSUPPORTED[device]}); use run.device=cpu.")
    found = find_accelerator()
    here: DeviceKind = "cpu" if found is None else cast(DeviceKind, found.type)
    if device not in ("auto", "cpu", here):
        raise ConfigError(
            f"run.device: is {device}, but no {device.upper()} device is visible; use run.device=auto or cpu."
        )
    return here if device == "auto" else device


def check_float8(device: str, name: str | None, layout: ParallelismSpec) -> None:
    """Raise ConfigError if the device (the GPU ``name``, if given) has no float8 products of ``layout``.

    The CPU is accepted, because its products are computed from the rounded values.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError("run.dtype: fp8 is for NVIDIA GPUs and the CPU; use run.dtype=bf16.")
    needed = RECIPES[layout.fp8_recipe].capability if isinstance(layout, Megatron) else (8, 9)
    has = needed
    if device == "cuda" and (name is None or name in GPUS):  # other names are refused with a list of them
        has = torch.cuda.get_device_capability() if name is None else GPUS[name].capability
    if has < needed:
        least, where = ".".join(map(str, needed)), name or torch.cuda.get_device_name()
        other = "another parallelism.fp8_recipe, or " if needed > (8, 9) else ""
        raise ConfigError(
            f"run.dtype: fp8 needs a GPU of compute capability {least} or above here (8.9 is Ada, 9.0 "
            f"Hopper, 10.0 Blackwell), which {where} is not; use {other}run.dtype=bf16."
        )


def check_ranks(world_size: int, device: str, local_ranks: int) -> None:
    """Raise ConfigError if this machine has too few GPUs for its ranks, or on CPU too little memory."""
    bearable = machine_memory() // PROGRAM
    if device == "cpu" and local_ranks > bearable:
        raise ConfigError(
            f"parallelism.dp: this layout takes {local_ranks} ranks (tp x pp x cp x dp), and this machine "
            f"has memory for {bearable} processes of one run; lower a size, or only forecast the run with "
            "preflight.mode=only."
        )
    if device != "cpu" and local_ranks > torch.accelerator.device_count():
        raise ConfigError(
            f"parallelism.dp: this layout takes {world_size} ranks (tp x pp x cp x dp) on "
            f"{torch.accelerator.device_count()} visible GPU(s); lower a size, or run on the CPU with "
            "run.device=cpu and the GPUs hidden (CUDA_VISIBLE_DEVICES= without a value)."
        )
