"""Descriptions of optimizers, which each engine implements in its own way."""

from components.optimizers.adamw_sgd import SGD, AdamW
from components.optimizers.build import (
    Optimizer,
    build_optimizer,
    decays,
    make_moments,
    torch_optimizer,
)
from components.optimizers.muon import Muon
from components.optimizers.torch_class import TorchClass, describe_class, kind_of_state

__all__ = [
    "SGD",
    "AdamW",
    "Muon",
    "Optimizer",
    "TorchClass",
    "build_optimizer",
    "decays",
    "describe_class",
    "kind_of_state",
    "make_moments",
    "torch_optimizer",
]
