"""Parsing and writing of overrides, and the command of a single job of a sweep."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

CONFIG_DIR = ("--config-dir", "-cd")


def is_sweep(command: Sequence[str]) -> bool:
    """Return whether ``command`` starts a sweep."""
    return any(word in ("-m", "--multirun") or word.startswith("sweep=") for word in command)


def single_job_overrides(overrides: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the arguments with which one job of the sweep ``command`` runs by itself.

    If ``overrides`` has ``sweep=OPTION``, ``hydra.mode=RUN`` is added, with which it does not start a sweep.
    """
    places = [word for word in join_config_dir(command) if word.startswith("--config-dir=")]
    swept = any(word.startswith("sweep=") for word in overrides)
    return [*places, *overrides, *(["hydra.mode=RUN"] if swept else [])]


def join_config_dir(words: Sequence[str]) -> list[str]:
    """Return the words of a command; ``--config-dir DIR`` and ``-cd DIR`` become one long-form word."""
    found: list[str] = []
    for before, word in pairwise(["", *words]):
        if before in CONFIG_DIR:
            found[-1] = f"--config-dir={word}"
        else:
            found.append(f"--config-dir={word[4:]}" if word.startswith("-cd=") else word)
    return found


def hydra_value(value: object) -> str:
    """Return ``value`` in the syntax of Hydra's overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {hydra_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(hydra_value, value))}]"
    text = str(value)
    if re.fullmatch(r"[\w./:~+-]+|\[[\w,]*\]", text, re.ASCII):
        return text
    # Hydra reads a backslash as it is, except before a quote.
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'") + "'"
