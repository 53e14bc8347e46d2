"""Parsing of YAML, which other programs may have written."""

import math
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times as fast
MOST_VALUES = 10**6


def parse_yaml(text: str) -> Any:
    """Return the value that the YAML ``text`` encodes.

    The number of values is limited because aliased values share memory only in the result, not in a copy of
    it or on a report page.

    Raises:
        yaml.YAMLError: if it is malformed, or has more than ``MOST_VALUES`` values with all aliases expanded.
    """
    value = yaml.load(text, Loader=LOADER)
    if number_of_values(value, {}) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES} values")
    return value


def number_of_values(value: object, known: dict[int, float]) -> float:
    """Return the number of values in ``value``, counting a shared value each time that it occurs.

    The number is infinite if ``value`` contains itself. ``known`` holds the numbers of values that have been
    counted already, by their ``id``.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(number_of_values(child, known) for child in children)
    return known[id(value)]
