"""Parameters and the tensors in them: a stacked one holds many, each with a name on disk of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ParamView:
    """A named tensor in a parameter of this rank: all of it, or one of those that are stacked there."""

    name: str
    """On disk."""
    parameter: nn.Parameter
    slices: Callable[[Tensor], Tensor]
    """From the parameter, its gradient or a moment of it to the tensor of this name: a DTensor where other
    ranks have other parts of it. Shares memory with what it is cut out of."""
    writes: bool
    """Whether this rank is the first of all that get the tensor where its holders gather it."""


def full_view(name: str, parameter: nn.Parameter, *, first: bool) -> ParamView:
    """Of a parameter that every rank has a part of."""
    return ParamView(name, parameter, lambda tensor: tensor, first)
