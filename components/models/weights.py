"""The names a model's parameters have on disk, which are their names everywhere in this program."""

import hashlib
import json
from typing import Protocol

import torch
from torch import Tensor, nn


class WeightSource(Protocol):
    """Weights by their Hugging Face parameter name."""

    def __call__(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The part ``index`` of the tensor (slices without a step; () is the whole) on CPU.

        In float32 or as stored, and not to be written to.
        """


def named_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Every parameter in the model's own order; tied ones once, under the name that comes first."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of tied parameters, and the one ``named_shapes`` lists: lm_head -> embed_tokens."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def shape_hash(model: nn.Module, *, trained: bool = False) -> str:
    """A hash of names and shapes: two models with one signature can read each other's checkpoints.

    ``trained``: of those that want a gradient.
    """
    parameters = model.named_parameters()
    shapes = sorted((name, list(p.shape)) for name, p in parameters if p.requires_grad or not trained)
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
