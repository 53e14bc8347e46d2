"""The installed distribution that this program belongs to: its name and its version."""

from functools import cache
from importlib.metadata import Distribution, entry_points

from components.contracts.errors import ConfigError


@cache
def distribution() -> Distribution:
    """Return the distribution that installs the command line, or raise ConfigError if there is none."""
    commands = [c for c in entry_points(group="console_scripts") if c.value == "runner.cli:main"]
    # `samecurve` sorts last; an installation under an earlier name may still be present.
    newest = max(commands, key=lambda command: command.name, default=None)
    if newest is None or newest.dist is None:
        raise ConfigError("this checkout is not installed; run `pip install -e .` in it.")
    return newest.dist


def pip_install(extra: str) -> str:
    """Return the command that installs an optional dependency group."""
    return f"pip install '{distribution().name}[{extra}]'"
