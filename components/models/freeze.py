"""Freezing a part of a model."""

import fnmatch
from collections.abc import Sequence

from transformers import PreTrainedModel

from components.contracts.errors import ConfigError


def freeze(model: PreTrainedModel, frozen: Sequence[str], train_only: Sequence[str] = ()) -> set[str]:
    """Freeze the parameters that match a pattern of ``frozen``, or that match none of ``train_only``.

    At most one of the two is given. Tied parameters match by any of their names. Return the names of the
    frozen parameters.

    Raises:
        ConfigError: if a pattern matches nothing, or nothing is left to train.
    """
    option, patterns = ("train_only", train_only) if train_only else ("freeze", frozen)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matched: set[int] = set()
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            raise ConfigError(
                f"model.{option}: {pattern!r} matches no parameter; a name is like {next(iter(parameters))}, "
                "and a pattern like 'model.layers.0.*'."
            )
        matched.update(id(parameters[name]) for name in found)
    left = {name for name, value in parameters.items() if (id(value) in matched) != bool(train_only)}
    for name in left:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.{option}: {list(patterns)} leaves nothing to train; change a pattern.")
    return left
