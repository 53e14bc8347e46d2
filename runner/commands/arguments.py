"""The KEY=VALUE arguments of the commands other than training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from components.contracts.errors import ConfigError
from components.home import expand_home
from runner.config.sources import did_you_mean

Keys = Mapping[str, tuple[str, ...] | None]
"""The allowed values of each key. None means that any value is allowed."""

UNREAD_TRUST = "trust: is not read with an exported folder, which names no class; leave it out."
PATHS = ("checkpoint", "adapter", "base", "output", "prompts")


def parse_pairs(
    arguments: Sequence[str], keys: Keys, *needed: str, usage: str | None = None
) -> dict[str, str]:
    """Parse KEY=VALUE arguments; ``~`` is expanded in paths.

    Raises:
        ConfigError: if an argument is not KEY=VALUE, a key or a value is unknown, or a key of ``needed`` is
            missing.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals and "checkpoint" in keys and is_path(argument):
            raise ConfigError(f"{argument}: is not KEY=VALUE; use checkpoint={argument}.")
        if key not in keys or not equals:
            raise ConfigError(f"{argument}: is not KEY=VALUE with a known key; {did_you_mean(key, keys)}")
        allowed = keys[key]
        if allowed is not None and value not in allowed:
            raise ConfigError(f"{argument}: must be {' or '.join(allowed)}.")
        given[key] = expand_home(key, value) if key in PATHS else value
    for key in needed:
        if key not in given:
            raise ConfigError(f"{key}: is missing. Usage: {first_line(usage)}")
    return given


def is_path(word: str) -> bool:
    """Return whether ``word`` is the path of a file or a folder."""
    try:
        return bool(word) and Path(word).exists()
    except OSError:  # it is too long
        return False


def trusted_modules(value: str) -> tuple[str, ...]:
    """Parse ``[MODULE,...]`` or ``MODULE``; raise ConfigError if a part is not the name of a module."""
    names = [name.strip() for name in value.removeprefix("[").removesuffix("]").split(",")]
    found = tuple(name for name in names if name)
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"trust: {name!r} is not the name of a module; give trust=[my.module].")
    return found


def first_line(text: str | None) -> str:
    """Return the first line of a command's description, which shows its usage."""
    return (text or "").splitlines()[0].replace("``", "")


def number_option(given: Mapping[str, str], key: str, default: float, *, least: float) -> float:
    """Return the value of ``key`` as a float, or ``default`` if the key is not given.

    Raises:
        ConfigError: if the value is not a finite number, or is below ``least``.
    """
    text = given.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value < math.inf:
        raise ConfigError(f"{key}: must be a number of at least {least:g}, got {text}.")
    return value


def whole_number(given: Mapping[str, str], key: str, default: int, *, least: int) -> int:
    """Return the value of ``key`` as an integer, or ``default`` if the key is not given.

    Raises:
        ConfigError: if the value is not an integer, or is below ``least``.
    """
    value = number_option(given, key, default, least=least)
    if value != int(value) or value >= 2**53:
        raise ConfigError(f"{key}: must be a whole number below 2^53, got {given[key]}.")
    return int(value)
