"""What a checkpoint of this engine holds: tensors under names that no layout changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_keys
from components.engines.fsdp2.param_views import ParamView
from components.optimizers import make_moments

Weights = Sequence[ParamView]
"""What this rank has of the weights that are trained."""

STEP = "optimizer_step"
"""Updates made so far: AdamW's bias correction counts them, and a skipped step is none."""


def saved_tensors(
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    moments: Sequence[str],
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """This rank's shards themselves, no copies; without ``optimizer`` the weights alone."""
    tensors = weight_tensors(weights) | bias_tensors(biases)
    if optimizer is not None:
        make_moments(optimizer, moments)
        tensors |= moment_tensors(weights, optimizer, moments)
        tensors[STEP] = first_step(optimizer)
        tensors |= rng_tensors(rank, device)
    return tensors


def load(
    path: Path,
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    moments: Sequence[str],
    rank: int,
    device: torch.device,
) -> None:
    """Restores in place what any number of ranks wrote.

    A rank that had no twin when the checkpoint was written keeps its own random stream.
    """
    make_moments(optimizer, moments)
    step, rng, keys = torch.zeros(1), rng_tensors(rank, device), saved_keys(path)
    tensors = weight_tensors(weights) | bias_tensors(biases)
    tensors |= moment_tensors(weights, optimizer, moments) | {STEP: step}
    known = {name: value for name, value in rng.items() if name in keys}
    load_tensors(path, tensors | known)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step.item())
    restore_rng(known)


def weight_tensors(weights: Weights) -> dict[str, Tensor]:
    return {f"model/{w.name}": w.slices(w.parameter.detach()) for w in weights}


def bias_tensors(biases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of routers: no gradient changes them, but training may."""
    return {f"model/{name}": bias for name, bias in biases.items()}


def moment_tensors(
    weights: Weights, optimizer: torch.optim.Optimizer, moments: Sequence[str]
) -> dict[str, Tensor]:
    return {f"{m}/{w.name}": w.slices(optimizer.state[w.parameter][m]) for w in weights for m in moments}


def first_step(optimizer: torch.optim.Optimizer) -> Tensor:
    states = [state["step"] for state in optimizer.state.values() if "step" in state]
    return states[0].detach().cpu().reshape(1) if states else torch.zeros(1)


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's random streams, as they are now."""
    streams = {f"rng/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        streams[f"rng_cuda/{rank}"] = torch.cuda.get_rng_state(device)
    return streams


def restore_rng(streams: dict[str, Tensor]) -> None:
    for name, state in streams.items():
        setter = torch.cuda.set_rng_state if name.startswith("rng_cuda/") else torch.set_rng_state
        setter(state)
