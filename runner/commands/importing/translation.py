"""The parts of a translated command, and the options of the file that are still to be translated."""

import math
from dataclasses import dataclass, field
from typing import Any

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from runner.config.unknown_keys import Counterpart, dictionary, documents, reason_of

ACTS_WHEN_OFF = ("double_quantization", "use_bnb_nested_quant", "init_lora_weights")
"""Options whose value false is another choice, and not the absence of one."""


@dataclass
class Translation:
    """The translated command, and the options of the file that it leaves out."""

    tool: str
    given: Json
    """The options of the file that have a value, under their own names."""
    left: Json = field(default_factory=dict)
    """Options and defaults that are still to be translated."""
    words: dict[str, object] = field(default_factory=dict)
    """The overrides of the command, by key."""
    checks: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    """Options of the file that are in no table. They are among ``missing``, or off."""
    missing: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)

    def take(self, *names: str) -> Any:
        """Remove options, and return the value of the first one that is set. None means that none is."""
        found = [self.left.pop(name, None) for name in names]
        return next((value for value in found if value is not None), None)

    def number(self, *names: str) -> float | None:
        """Remove options as ``take`` does, and return the value as a float.

        Raises:
            ConfigError: if the value is not a number.
        """
        value = self.take(*names)
        return None if value is None else as_number(names[0], value)

    def lacks(self, name: str, why: str) -> None:
        """Record that an option of the file has no equivalent; a default value needs no record."""
        if is_off(self.given.get(name)) and name not in ACTS_WHEN_OFF:
            self.needless |= {name: "it is off"} if name in self.given else {}
        else:
            self.missing[f"{name}={' '.join(str(self.given[name]).split())[:80]}"] = why

    def skip(self, name: str, why: str) -> None:
        """Remove an option and, if the file gives it, record that it is not needed."""
        self.left.pop(name, None)
        self.needless |= {name: why} if name in self.given else {}

    def row(self, name: str) -> Counterpart | None:
        tables = (dictionary()[table] for table in documents()[1][self.tool]["tables"])
        return next((table[name] for table in tables if name in table), None)

    def names_of(self, key: str) -> list[str]:
        """Return the options of the file whose equivalent is ``key``."""
        rows = ((name, self.row(name)) for name in self.given)
        return [name for name, row in rows if row is not None and row.here.partition("=")[0] == key]

    def reason(self, kind: str, name: str, *, exact: bool) -> str | None:
        """Return why an option is ``not_needed`` or has ``no_equivalent``. None means that it is neither.

        With ``exact``, entries that are patterns do not count.
        """
        reasons = (reason_of(where, kind, name, exact=exact) for where in (self.tool, "common"))
        return next((why for why in reasons if why), None)


def as_number(name: str, value: Any) -> float:
    """Return the value of an option as a float, or raise ConfigError if it is not a number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name}: must be a number, got {value}; correct it.")
    return number


def is_off(value: object) -> bool:
    """Return whether ``value`` turns an option off. None, for an option without a value, does so too."""
    return str(value).lower() in ("none", "false", "no", "0", "0.0", "[]", "{}")


def as_list(value: object) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
