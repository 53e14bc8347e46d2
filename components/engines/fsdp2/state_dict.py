"""The tensors of a checkpoint, under names that do not depend on the layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_keys
from components.engines.fsdp2.param_views import ParamView
from components.optimizers import make_moments

Weights = Sequence[ParamView]
"""This rank's shards of the trained weights."""

STEP = "optimizer_step"
"""Key of the number of updates for AdamW's bias correction. Skipped steps do not count."""


def saved_tensors(
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    moments: Sequence[str],
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return this rank's shards, without copying. Without ``optimizer`` only the weights and biases."""
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
    """Restore in place a checkpoint written by any number of ranks.

    A rank whose number did not exist when the checkpoint was written keeps its own random stream.
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
    """Return the router biases, which have no gradient but may change in training, by key."""
    return {f"model/{name}": bias for name, bias in biases.items()}


def moment_tensors(
    weights: Weights, optimizer: torch.optim.Optimizer, moments: Sequence[str]
) -> dict[str, Tensor]:
    return {f"{m}/{w.name}": w.slices(optimizer.state[w.parameter][m]) for w in weights for m in moments}


def first_step(optimizer: torch.optim.Optimizer) -> Tensor:
    states = [state["step"] for state in optimizer.state.values() if "step" in state]
    return states[0].detach().cpu().reshape(1) if states else torch.zeros(1)


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the current states of this rank's random streams, by key."""
    streams = {f"rng/{rank}": torch.get_rng_state()}
    if device.type == "cuda":
        streams[f"rng_cuda/{rank}"] = torch.cuda.get_rng_state(device)
    return streams


def restore_rng(streams: dict[str, Tensor]) -> None:
    for name, state in streams.items():
        setter = torch.cuda.set_rng_state if name.startswith("rng_cuda/") else torch.set_rng_state
        setter(state)
