"""Detection of this machine's accelerator with ``torch.accelerator``."""

import torch

UNSUPPORTED = {"mps": "FSDP2 needs streams, its sums need float64, and torch has neither on MPS"}
"""Kinds of device that torch supports but no engine can use, each with the reason."""


def find_accelerator() -> torch.device | None:
    """Return this machine's accelerator. None means that it has none that an engine can use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in UNSUPPORTED else found


def inference_device(model: torch.nn.Module) -> torch.device:
    """Return the accelerator if the weights of ``model`` need less than half its free memory, else the CPU.

    A model that was trained on several devices may not fit on one.
    """
    found, size = find_accelerator(), sum(p.nbytes for p in model.parameters())
    if found is None or 2 * size >= torch.accelerator.get_memory_info(0)[0]:
        return torch.device("cpu")
    return found
