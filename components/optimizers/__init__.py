"""Descriptions of optimizers, which each engine implements in its own way."""

from components.optimizers.adamw_sgd import SGD, AdamW
from components.optimizers.build import (
    Optimizer,
    WeightOptions,
    decays,
    make_moments,
    needs_whole_weights,
    state_bytes,
    torch_optimizer,
    weight_options,
)
from components.optimizers.muon import Muon, muon_in_float32
from components.optimizers.torch_class import StateKinds, TorchClass, describe_class, kind_of_state
from components.optimizers.weight_groups import WeightGroup, check_matches

__all__ = [
    "SGD",
    "AdamW",
    "Muon",
    "Optimizer",
    "StateKinds",
    "TorchClass",
    "WeightGroup",
    "WeightOptions",
    "check_matches",
    "decays",
    "describe_class",
    "kind_of_state",
    "make_moments",
    "muon_in_float32",
    "needs_whole_weights",
    "state_bytes",
    "torch_optimizer",
    "weight_options",
]
