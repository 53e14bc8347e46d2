"""The message for a key that nothing reads: its new name, its name here, or the most similar keys.

``python -m runner.config.unknown_keys`` prints docs/dictionary.md.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from components.contracts.errors import ConfigError
from runner.config.renamed_keys import RENAMED
from runner.config.sources import did_you_mean

MOST_LISTED = 12
"""Number of keys above which a message does not list them all."""


@dataclass(frozen=True)
class Counterpart:
    """The name and the values that an option of another tool has here."""

    here: str
    """KEY, or KEY=VALUE for a switch."""
    remark: str = ""
    values: Mapping[str, object] | None = None
    """Our value for each of theirs, in lower case. None means that both have the same values."""


@cache
def documents() -> tuple[Any, Any]:
    """Return both documents of other_tools.yaml."""
    words, importing = yaml.safe_load_all(files("runner.config").joinpath("other_tools.yaml").read_text())
    return words, importing


@cache
def dictionary() -> dict[str, dict[str, Counterpart]]:
    """Return, by tool, the options of other tools and what they are here."""
    return {
        tool: {word: read_row(row) for word, row in rows.items()} for tool, rows in documents()[0].items()
    }


def read_row(row: str | Mapping[str, Any]) -> Counterpart:
    """Return a row of the file: ``KEY; remark``, or a mapping."""
    if isinstance(row, str):
        ours, _, remark = row.partition("; ")
        return Counterpart(ours, remark)
    values = {str(theirs).lower(): ours for theirs, ours in row["values"].items()}
    return Counterpart(row["here"], row.get("remark", ""), values)


def counterpart(word: str) -> str | None:
    """Return what another tool's option is called here, or None if no tool has one of that name."""
    name = word.lstrip("-+").replace("-", "_").rsplit(".", 1)[-1]
    for tool, options in dictionary().items():
        if name in options:
            row = options[name]
            return f"use {row.here}{f' ({row.remark})' if row.remark else ''} for {tool}'s {name}."
    return None


def translations(words: Iterable[str]) -> str:
    """Return what other tools' options among ``words`` are here, as one line, or "" if there are none."""
    tables = dictionary().values()
    found = {word: next((rows[word].here for rows in tables if word in rows), "") for word in words}
    listed = ", ".join(f"{word} ({here})" for word, here in found.items() if here)
    return f"\nAlso {listed}; python -m runner.import_config translates a whole file." if listed else ""


def counterpart_of_value(group: str, word: str) -> object:
    """Return the option of ``group`` that another tool calls ``word``, or None if no tool does."""
    rows = (row for options in dictionary().values() for row in options.values() if row.here == group)
    return next((row.values[word] for row in rows if row.values and word in row.values), None)


def unknown_key(key: str, source: str, known: Iterable[str]) -> ConfigError:
    """Return the error for the unknown ``key``; ``source`` is where it was given."""
    if key in RENAMED:
        return ConfigError(f"{key} ({source}): is {RENAMED[key]} now; use that name.")
    options = sorted(known)
    hint = counterpart(key) or did_you_mean(key, options)
    if hint.startswith("known: ") and len(options) > MOST_LISTED:
        hint = (
            "`python -m runner --cfg job` prints all keys, and docs/dictionary.md names other tools' options."
        )
    return ConfigError(f"{key} ({source}): nothing reads this key; {hint}")


def check_long_options(words: Iterable[str]) -> None:
    """Raise ConfigError if a word is ``--OPTION`` of another tool."""
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and (hint := counterpart(name)):
            raise ConfigError(f"{name}: options are KEY=VALUE, without dashes; {hint}")


def page() -> Iterator[str]:
    """Yield the lines of docs/dictionary.md."""
    yield "# Dictionary of other tools' options"
    yield ""
    yield "What the options of other tools are called here. If one is given, an error says so."
    yield "`python -m runner.import_config llamafactory|axolotl|trl FILE` translates a whole configuration."
    for tool, options in dictionary().items():
        yield from ("", f"## {tool}", "", "| there | here | remark |", "|---|---|---|")
        for word, row in sorted(options.items()):
            yield f"| `{word}` | `{row.here}` | {row.remark} |"


if __name__ == "__main__":
    print(*page(), sep="\n")
