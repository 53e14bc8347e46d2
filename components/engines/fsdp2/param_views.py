"""Named views of parameters. A parameter of stacked experts holds many tensors, each with a name on disk."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ParamView:
    """A named tensor in a parameter of this rank: all of it, or one of several stacked tensors."""

    name: str
    """Name on disk."""
    parameter: nn.Parameter
    slices: Callable[[Tensor], Tensor]
    """Function from the parameter, its gradient or a moment of it to the tensor of this name, which shares
    its memory. The result is a DTensor if other ranks have other parts of it."""
    writes: bool
    """Whether this rank is the first of the ranks that get the full tensor when it is gathered."""
