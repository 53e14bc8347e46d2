"""Freezing a part of a model."""

import fnmatch
from collections.abc import Sequence

from transformers import PreTrainedModel

from components.contracts.errors import ConfigError


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters that a pattern matches; tied ones match by any of their names.

    Raises:
        ConfigError: if a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = fnmatch.filter(parameters, pattern)
        if not found:
            raise ConfigError(
                f"model.freeze: {pattern!r} matches no parameter; a name is like {next(iter(parameters))}, "
                "and a pattern like 'model.layers.0.*'."
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.freeze: {list(patterns)} leaves nothing to train; take a pattern out.")
