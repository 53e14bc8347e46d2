"""Parsing of the command line, and the command of a single job of a sweep."""

from collections.abc import Sequence
from itertools import pairwise


def is_sweep(command: Sequence[str]) -> bool:
    """Return whether ``command`` starts a sweep."""
    return any(word in ("-m", "--multirun") or word.startswith("sweep=") for word in command)


def single_job_overrides(overrides: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the arguments with which one job of the sweep ``command`` runs by itself.

    If ``overrides`` has ``sweep=OPTION``, ``hydra.mode=RUN`` is added, with which it does not start a sweep.
    """
    places = [word for word in command if word.startswith(("--config-dir=", "-cd="))]
    pairs = pairwise(command)
    places += [f"--config-dir={after}" for word, after in pairs if word in ("--config-dir", "-cd")]
    swept = any(word.startswith("sweep=") for word in overrides)
    return [*places, *overrides, *(["hydra.mode=RUN"] if swept else [])]
