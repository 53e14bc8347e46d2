"""Names for objects whose schema is written down elsewhere; imported before torch is."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""An object that a JSON or YAML file holds; who reads a key knows its type."""

Config = Mapping[str, Any]
"""The composed configuration, or a node of it: values are checked when objects are made of it."""
