"""Type aliases for JSON objects and configuration nodes, in a module that does not import torch."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""An object of a JSON or YAML file. The types of its values are not declared."""

Config = Mapping[str, Any]
"""The composed configuration, or a node of it. Values are checked when objects are made from it."""
