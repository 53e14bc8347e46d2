"""Names for objects whose schema is defined elsewhere. This module is imported before torch."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""An object of a JSON or YAML file; the code that reads a key knows its type."""

Config = Mapping[str, Any]
"""The composed configuration, or a node of it. Values are checked when objects are made from it."""
