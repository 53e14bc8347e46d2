"""YAML of files that others may have written."""

import math
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times as fast
MOST_VALUES = 10**6


def parse_yaml(text: str) -> Any:
    """Return the value of ``text``.

    Raises:
        yaml.YAMLError: if it is malformed, or its aliases stand for more than ``MOST_VALUES`` values. These
            share memory here, but not in a copy or on a page.
    """
    value = yaml.load(text, Loader=LOADER)
    if number_of_values(value, {}) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MOST_VALUES} values")
    return value


def number_of_values(value: object, known: dict[int, float]) -> float:
    """Return how many values ``value`` holds; shared ones count each time. Infinity if it holds itself."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(number_of_values(child, known) for child in children)
    return known[id(value)]
