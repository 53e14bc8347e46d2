"""Weights with a learning rate or a weight decay of their own."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ConfigDict

from components.contracts.errors import ConfigError, check_at_least_zero

ParamGroup = dict[str, Any]
"""A group of a torch optimizer: ``params``, pairs of name and parameter, and fields of ``WeightOptions``."""


@dataclass(frozen=True)
class WeightGroup:
    """Options of the weights whose names match a pattern; the first group that matches a weight applies."""

    match: str
    """Pattern of names on disk, such as ``*.embed_tokens.*`` or ``*.lora_B.*``."""
    lr: float | None = None
    """Peak learning rate, with the schedule of ``optimizer.lr``. None means ``optimizer.lr``."""
    weight_decay: float | None = None
    """Weight decay, which also applies to matching vectors (biases and norms). None means
    ``optimizer.weight_decay``, or 0 for vectors."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


def find_group(groups: Sequence[WeightGroup], name: str) -> WeightGroup | None:
    """Return the first group that matches ``name``, or None."""
    return next((group for group in groups if fnmatch.fnmatchcase(name, group.match)), None)


def check_groups(groups: Sequence[WeightGroup], lr: float) -> None:
    """Raise ConfigError if a number of a group is out of range, or ``lr`` is 0 but that of a group is not."""
    for number, group in enumerate(groups):
        check_at_least_zero(f"optimizer.groups[{number}]", group, "lr", "weight_decay")
        if group.lr and not lr:
            raise ConfigError(
                f"optimizer.groups[{number}].lr: follows the schedule of optimizer.lr, which is 0; set "
                "optimizer.lr above 0."
            )


def check_matches(groups: Sequence[WeightGroup], tensors: Iterable[Sequence[str]]) -> None:
    """Check the patterns of ``groups`` against the trained weights.

    Args:
        groups: the groups of an optimizer.
        tensors: for each tensor of the engine, the names on disk of the trained weights that it holds.

    Raises:
        ConfigError: if a pattern matches no weight or only those that earlier patterns match, or weights in
            one tensor are in different groups.
    """
    together = [*tensors]
    names = left = [name for tensor in together for name in tensor]
    for number, group in enumerate(groups):
        if not fnmatch.filter(names, group.match):
            raise ConfigError(
                f"optimizer.groups[{number}].match: {group.match!r} matches no trained weight; a name is "
                f"like {names[0]}, and a pattern like '*.embed_tokens.*'."
            )
        if not fnmatch.filter(left, group.match):
            raise ConfigError(
                f"optimizer.groups[{number}].match: {group.match!r} matches no weight except those that an "
                "earlier pattern takes; put it first."
            )
        left = [name for name in left if not fnmatch.fnmatchcase(name, group.match)]
    for tensor in together:
        for name in tensor[1:]:
            if find_group(groups, name) != find_group(groups, tensor[0]):
                raise ConfigError(
                    f"optimizer.groups: {tensor[0]} and {name} are in one tensor in this layout, and in "
                    "different groups; use one group for both."
                )
