"""Parsing and writing of overrides, and the command of a single job of a sweep."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

FLAGS = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path"}
"""Short form -> long form of Hydra's flags that choose the config files."""
MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
"""Words of a command line that start a sweep."""


def is_sweep(command: Sequence[str]) -> bool:
    """Return whether the words of ``command`` start a sweep.

    A file can also start one, with ``hydra.mode``.
    """
    by_file = "hydra.mode=RUN" not in command and any(word.startswith("sweep=") for word in command)
    return by_file or any(word in MULTIRUN for word in command)


def single_job_overrides(overrides: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the arguments with which one job of the sweep ``command`` runs by itself.

    ``hydra.mode=RUN`` is added if a file may start the sweep, and not only a flag of ``command``.
    """
    places = [word for word in long_flags(command) if word.startswith(tuple(FLAGS.values()))]
    by_file = bool(command) and not any(word in MULTIRUN for word in command)
    swept = any(word.startswith(("sweep=", "experiment=")) for word in overrides)
    return [*places, *overrides, *(["hydra.mode=RUN"] if swept or by_file else [])]


def long_flags(words: Sequence[str]) -> list[str]:
    """Return the words of a command, in which each of ``FLAGS`` and its value become one long-form word."""
    found: list[str] = []
    for before, word in pairwise(["", *words]):
        name, _, value = word.partition("=")
        if before in FLAGS or before in FLAGS.values():
            found[-1] = f"{FLAGS.get(before, before)}={word}"
        else:
            found.append(f"{FLAGS[name]}={value}" if name in FLAGS else word)
    return found


def hydra_value(value: object, *, texts: bool = False, fields: Collection[str] = ()) -> str:
    """Return ``value`` in the syntax of Hydra's overrides, with ``texts`` as text even if it is a number.

    In mappings, only the values of the keys ``fields`` are texts.
    """
    if value is None or (isinstance(value, bool) and not texts):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        pairs = (f"{key}: {hydra_value(item, texts=key in fields)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(hydra_value(item, texts=texts, fields=fields) for item in value)}]"
    text = str(value)
    # As Python does, Hydra ignores underscores in numbers.
    is_number = (texts or "_" in text) and re.fullmatch(r"[+-]?[\d_.]+([eE][+-]?[\d_]+)?", text)
    is_word = texts and re.fullmatch(r"[+-]?(nan|inf)|true|false|null", text, re.IGNORECASE)
    unquoted = r"[\w./:+-]+" if texts else r"[\w./:~+-]+|\[[\w,]*\]"
    if re.fullmatch(unquoted, text, re.ASCII) and not (is_number or is_word):
        return text
    # Hydra reads a backslash as it is, except before a quote.
    return "'" + re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'") + "'"
