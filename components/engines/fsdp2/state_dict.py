"""The tensors of a checkpoint, under names that do not depend on the layout."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.checkpoint.dcp import load_tensors, saved_sizes
from components.checkpoint.reader import StoredTensors
from components.engines.fsdp2.param_views import ParamView
from components.engines.fsdp2.sharded_optimizer import ShardedOptimizer
from components.engines.shared.whole_weights import WholeWeightOptimizer

WeightOptimizer = ShardedOptimizer | WholeWeightOptimizer
Weights = Sequence[ParamView]
"""This rank's shards of the trained weights and of pissa's initial factors."""


def load(
    path: Path,
    weights: Weights,
    biases: Mapping[str, Tensor],
    optimizer: WeightOptimizer,
    rank: int,
    device: torch.device,
) -> None:
    """Restore the state in place from a checkpoint that any number of ranks wrote.

    A rank whose number did not exist when the checkpoint was written keeps its own random stream.
    """
    rng, saved = rng_tensors(rank, device), saved_sizes(path)
    tensors = weight_tensors(weights, biases)
    tensors |= {name: value for name, value in rng.items() if name in saved}
    with optimizer.loading(saved) as state:
        load_tensors(path, tensors | state)
    restore_rng({name: tensors[name] for name in rng if name in tensors})


def load_weights(path: Path, weights: Weights, biases: Mapping[str, Tensor]) -> None:
    """Restore only the weights that evaluations use, without optimizer state and random states.

    If the optimizer keeps averaged weights, as schedule-free AdamW does, these are read; otherwise, the
    trained weights are. ``biases`` are the router biases. Every rank calls this function.
    """
    kind = StoredTensors(path).kind_to_evaluate
    load_tensors(path, weight_tensors(weights, biases, kind))


def weight_tensors(weights: Weights, biases: Mapping[str, Tensor], kind: str = "model") -> dict[str, Tensor]:
    """Return this rank's shards of the weights and its router biases by checkpoint key, without copying."""
    named = {w.name: w.slices(w.parameter.detach()) for w in weights} | dict(biases)
    return {f"{kind}/{name}": tensor for name, tensor in named.items()}


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return the current states of this rank's random streams, by key."""
    streams = {f"rng/{rank}": torch.get_rng_state()}
    if device.type != "cpu":
        module = torch.get_device_module(device)
        streams[f"rng_{device.type}/{rank}"] = module.get_rng_state(device)
    return streams


def restore_rng(streams: dict[str, Tensor]) -> None:
    for name, state in streams.items():
        stream, _, _ = name.partition("/")
        module = torch if stream == "rng" else torch.get_device_module(stream.removeprefix("rng_"))
        module.set_rng_state(state)
