"""The module search path, which is set so that the working directory hides no package of this program.

This module imports no package of this program, because it runs before the search path is correct.
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IS_INSTALLED = ROOT.name in {"site-packages", "dist-packages"}
"""Whether the packages are in site-packages, where every process finds them.

A checkout may have to be added to the search path.
"""


def program_first() -> None:
    """Move the working directory to the end of the search path, where a user's own modules are still found.

    ``python -m`` puts the working directory first, and a console script leaves it out. A checkout is put
    first, and is added to PYTHONPATH, with which processes that ``python_module`` starts import the same
    files.

    Raises:
        SystemExit: with code 2, after a message, if the working directory was deleted.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        print("error: the working directory was deleted; change to one that exists.", file=sys.stderr)
        raise SystemExit(2) from None  # as for every mistake, see components.contracts.errors
    own = [] if IS_INSTALLED else [str(ROOT)]
    kept = [path for path in sys.path if path not in {"", folder, *own}]
    sys.path[:] = [*own, *kept, *({folder} - {*own})]
    inherited = os.environ.get("PYTHONPATH")
    if own and str(ROOT) not in (inherited or "").split(os.pathsep):
        # An empty entry would be the working directory.
        os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}" if inherited else str(ROOT)


def follow_parent(parent: Sequence[str]) -> None:
    """Put the folders of the user on the search path ``parent`` of another process at the end of this one.

    They keep their order, so that both processes find the same files, and hide no installed package.
    """
    kept = [path for path in sys.path if path not in {os.getcwd()} - {str(ROOT)}]
    sys.path[:] = [*kept, *(path for path in parent if path not in kept)]


def python_module(name: str) -> list[str]:
    """Return the command that runs a module without looking for it in the working directory."""
    return [sys.executable, "-P", "-m", name]


def ensure_own_packages() -> None:
    """Call ``program_first`` under ``python -m``, or if another package ``components`` hides this program's.

    Raises:
        ImportError: if another package is still found.
    """
    # While Python looks for the module of ``python -m``, sys.argv[0] is "-m".
    if sys.argv[:1] == ["-m"] or other_components() is not None:
        program_first()
    if (other := other_components()) is not None:
        raise ImportError(
            f"`import components` finds {other} instead of {ROOT / 'components'}; rename it, or take its "
            "folder off PYTHONPATH."
        )


def other_components() -> str | None:
    """Return the path of another package ``components``. None means that this program's own is found."""
    spec = find_spec("components")
    if spec is None or spec.origin is None:
        return "no file"
    return None if Path(spec.origin).resolve().parents[1] == ROOT else spec.origin
