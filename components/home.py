"""Expansion of ``~`` and ``~user`` at the beginning of paths."""

import os

from components.contracts.errors import ConfigError


def expand_home(option: str, path: str) -> str:
    """Replace a leading ``~`` or ``~user`` of ``path``, the value of ``option``, by that user's home folder.

    Raises:
        ConfigError: if there is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path[1:].partition("/")[0]
        raise ConfigError(f"{option}={path}: there is no user {user!r}; correct it, or write ./{path}.")
    return expanded
