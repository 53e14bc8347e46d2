"""Use of torch optimizer classes as ``_target_``: the configuration describes them with a ``TorchClass``."""

import inspect
from typing import Any

import torch

from components.optimizers import describe_class


def described(target: Any) -> Any:
    """Return a function from arguments to a ``TorchClass`` if ``target`` is a torch optimizer class.

    If ``target`` is anything else, it is returned unchanged.

    Raises:
        ConfigError: if the class has no argument ``lr``, which the scheduler sets.
    """
    if inspect.isclass(target) and issubclass(target, torch.optim.Optimizer):
        return describe_class(target)
    return target
