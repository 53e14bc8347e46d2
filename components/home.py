"""Paths that begin with the home of a user, as a shell writes them."""

import os

from components.contracts.errors import ConfigError


def expand_home(option: str, path: str) -> str:
    """Replace a leading ``~`` or ``~user`` of ``path``, the value of ``option``, by the home of that user.

    Raises:
        ConfigError: if there is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path[1:].partition("/")[0]
        raise ConfigError(f"{option}={path}: there is no user {user!r}; correct it, or write ./{path}.")
    return expanded
