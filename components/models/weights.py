"""Names and shapes of a model's parameters, as all parts of this program use them."""

import hashlib
import json

import torch
from torch import nn


def named_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter in the model's order; tied ones once, under their first name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its name in ``named_shapes``: lm_head -> embed_tokens."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def shape_hash(model: nn.Module, *, trained: bool = False) -> str:
    """Return a hash of names and shapes; models with equal hashes can read each other's checkpoints.

    With ``trained``, only parameters that require a gradient count.
    """
    parameters = model.named_parameters()
    shapes = sorted((name, list(p.shape)) for name, p in parameters if p.requires_grad or not trained)
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
