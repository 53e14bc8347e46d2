"""Reading of YAML files, which other programs may have written."""

import math
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times as fast
MOST_VALUES = 10**6


def parse_yaml(text: str) -> Any:
    """Return the value of ``text``.

    Raises:
        yaml.YAMLError: if it is malformed, or has more than ``MOST_VALUES`` values with all aliases expanded.
            Aliased values share memory in the result, but not in a copy of it or on a report page.
    """
    value = yaml.load(text, Loader=LOADER)
    if number_of_values(value, {}) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES} values")
    return value


def number_of_values(value: object, known: dict[int, float]) -> float:
    """Return the number of values in ``value``, with shared ones counted each time.

    It is infinite if ``value`` contains itself.
    """
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(number_of_values(child, known) for child in children)
    return known[id(value)]
