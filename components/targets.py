"""Descriptions of the torch optimizer classes that ``_target_`` names; other classes need none."""

import inspect
from typing import Any

import torch

from components.optimizers import describe_class


def described(target: Any) -> Any:
    """Return a function that describes ``target`` from its arguments if it is a torch optimizer class.

    Anything else is returned as it is.

    Raises:
        ConfigError: if the class has no learning rate that a scheduler could set.
    """
    if inspect.isclass(target) and issubclass(target, torch.optim.Optimizer):
        return describe_class(target)
    return target
