"""The message for a key that nothing reads: its new name, its name here, or the most similar keys.

``python -m runner.config.unknown_keys`` prints docs/dictionary.md.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files

import yaml

from components.contracts.errors import ConfigError
from runner.config.renamed_keys import RENAMED
from runner.config.sources import did_you_mean

MOST_LISTED = 12
"""Number of keys above which a message does not list them all."""


@cache
def dictionary() -> dict[str, dict[str, str]]:
    """Return, by tool, the options of other tools and what they are here."""
    found: dict[str, dict[str, str]] = yaml.safe_load(
        files("runner.config").joinpath("other_tools.yaml").read_text()
    )
    return found


def counterpart(word: str) -> str | None:
    """Return what another tool's option is called here, or None if no tool has one of that name."""
    name = word.lstrip("-+").replace("-", "_").rsplit(".", 1)[-1]
    for tool, options in dictionary().items():
        if name in options:
            ours, _, remark = options[name].partition("; ")
            return f"use {ours}{f' ({remark})' if remark else ''} for {tool}'s {name}."
    return None


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
    for tool, options in dictionary().items():
        yield from ("", f"## {tool}", "", "| there | here | remark |", "|---|---|---|")
        for word, answer in sorted(options.items()):
            ours, _, remark = answer.partition("; ")
            yield f"| `{word}` | `{ours}` | {remark} |"


if __name__ == "__main__":
    print(*page(), sep="\n")
