"""The module search path: nothing in the working directory hides a package of this program."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from runner.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
IS_INSTALLED = ROOT.name in {"site-packages", "dist-packages"}
"""Whether every Python of this environment finds the packages. A checkout may need its path."""


def program_first() -> None:
    """Move the working directory to the end of the search path, where a user's own modules are still found.

    ``python -m`` puts it first, and a console script leaves it out. The search path of a checkout begins with
    the checkout, and so does PYTHONPATH: processes that `python_module` starts import the same files.
    """
    folder, own = os.getcwd(), [] if IS_INSTALLED else [str(ROOT)]
    kept = [path for path in sys.path if path not in {"", folder, *own}]
    sys.path[:] = [*own, *kept, *({folder} - {*own})]
    inherited = os.environ.get("PYTHONPATH")
    if own and str(ROOT) not in (inherited or "").split(os.pathsep):
        # An empty entry would be the working directory.
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)


def python_module(name: str) -> list[str]:
    """Return the command that runs a module without searching the working directory."""
    return [sys.executable, "-P", "-m", name]


def check_not_hidden() -> None:
    """Raises ConfigError if ``components`` is another package than the one of this program."""
    spec = find_spec("components")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != ROOT:
        found = "nothing" if spec is None else spec.origin or list(spec.submodule_search_locations or [])
        raise ConfigError(
            f"PYTHONPATH: `import components` finds {found} instead of {ROOT / 'components'}; "
            "rename that one, or take its folder off PYTHONPATH."
        )
