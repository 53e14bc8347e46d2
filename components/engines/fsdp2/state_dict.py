"""The tensors of a checkpoint, under names that do not depend on the layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_keys
from components.engines.fsdp2.param_views import ParamView
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer

Weights = Sequence[ParamView]
"""This rank's shards of the trained weights."""


def saved_tensors(
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: ShardedOptimizer | None,
    rank: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return this rank's shards, without copying. Without ``optimizer`` only the weights and biases."""
    tensors = weight_tensors(weights) | bias_tensors(biases)
    if optimizer is not None:
        with optimizer.completed():
            tensors |= moment_tensors(weights, optimizer) | optimizer.counters() | optimizer.whole()
        tensors |= rng_tensors(rank, device)
    return tensors


def load(
    path: Path,
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: ShardedOptimizer,
    rank: int,
    device: torch.device,
) -> None:
    """Restore in place a checkpoint written by any number of ranks.

    A rank whose number did not exist when the checkpoint was written keeps its own random stream.
    """
    optimizer.make_moments()
    counters, rng, keys = optimizer.counters(), rng_tensors(rank, device), saved_keys(path)
    tensors = weight_tensors(weights) | bias_tensors(biases)
    tensors |= moment_tensors(weights, optimizer) | counters | optimizer.whole()
    known = {name: value for name, value in rng.items() if name in keys}
    load_tensors(path, tensors | known)
    optimizer.set_counters(counters)
    restore_rng(known)


def weight_tensors(weights: Weights) -> dict[str, Tensor]:
    return {f"model/{w.name}": w.slices(w.parameter.detach()) for w in weights}


def bias_tensors(biases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the router biases, which have no gradient but may change in training, by key."""
    return {f"model/{name}": bias for name, bias in biases.items()}


def moment_tensors(weights: Weights, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    moments = optimizer.moments
    return {f"{m}/{w.name}": w.slices(optimizer.moment(m, w.parameter)) for w in weights for m in moments}


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
