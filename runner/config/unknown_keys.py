"""The message for an unknown key: its new name, the equivalent of another tool's option, or similar keys.

``python -m runner.config.unknown_keys`` prints docs/dictionary.md.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from itertools import pairwise, product
from shlex import quote

import yaml

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config, Json
from runner.config.command_line import hydra_value
from runner.config.sources import did_you_mean
from runner.records.renamed_keys import RENAMED

MOST_LISTED = 12
"""Maximum number of known keys that a message lists. If there are more, it lists none."""


@dataclass(frozen=True)
class Counterpart:
    """The equivalent here of an option of another tool, with its values."""

    here: str
    """KEY, or KEY=VALUE if the other tool's option is a flag, or if all its values mean this value here."""
    remark: str = ""
    values: Mapping[str, object] | None = None
    """Value of the other tool, in lower case -> value here. None means that the values are the same."""


@cache
def documents() -> tuple[Json, Json, Json]:
    """Return the YAML documents of other_tools.yaml: options of tools, rules of the import, and values."""
    text = files("runner.config").joinpath("other_tools.yaml").read_text()
    options, importing, values = yaml.safe_load_all(text)
    return options, importing, values


@cache
def dictionary() -> dict[str, dict[str, Counterpart]]:
    """Return, for each other tool, its options with their counterparts here."""
    return {
        tool: {word: read_row(row) for word, row in rows.items()} for tool, rows in documents()[0].items()
    }


def read_row(row: str | Config) -> Counterpart:
    """Parse a row of other_tools.yaml, which is ``KEY; remark`` or a mapping."""
    if isinstance(row, str):
        ours, _, remark = row.partition("; ")
        return Counterpart(ours, remark)
    values = {str(theirs).lower(): ours for theirs, ours in row["values"].items()}
    return Counterpart(row["here"], row.get("remark", ""), values)


def counterpart(word: str, value: str = "") -> str | None:
    """Return a hint with the equivalent of another tool's option ``word``, and of ``value`` if it is known.

    None means that no tool has an option of this name.
    """
    name = last_name(word)
    for tool, options in dictionary().items():
        if name in options:
            if answer := answer_of(row := options[name], value):
                return f"for {tool}'s {name}={value}, {answer}."
            return f"use {row.here}{remark_of(row)} for {tool}'s {name}."
    return None


def answer_of(row: Counterpart, value: str) -> str | None:
    """Return what to use for another tool's ``value``. None means that nothing here is known for it."""
    if answer := answers_to(row.here).get(value.lower()):
        return answer
    ours = (row.values or {}).get(value.lower())
    return None if ours is None else f"use {quote(f'{row.here}={hydra_value(ours)}')}{remark_of(row)}"


def remark_of(row: Counterpart) -> str:
    return f" ({row.remark})" if row.remark else ""


def answers_to(key: str) -> dict[str, str]:
    """Return the answers to values that users of other tools give to our ``key``, by value in lower case."""
    return {str(theirs).lower(): answer for theirs, answer in documents()[2]["values"].get(key, {}).items()}


def reason(word: str, known: Iterable[str], *, exact: bool = True) -> str | None:
    """Return why another tool's option ``word`` is not needed here, or what to use in its place.

    None means that no tool has such an option, that a key in ``known`` has the same name, or that ``word`` is
    in a group of this program other than ``run``. With ``exact``, entries that are patterns do not count.
    """
    name = last_name(word)
    if word.lstrip("-+").partition(".")[0] not in (name, "run") or name in {last_name(key) for key in known}:
        return None
    for tool, kind in product(documents()[1], ("not_needed", "no_equivalent")):
        if why := reason_of(tool, kind, name, exact=exact):
            return f"if another tool's option is meant: {why}."
    return None


def reason_of(tool: str, kind: str, name: str, *, exact: bool) -> str | None:
    """Return why an option of ``tool`` is ``not_needed`` or has ``no_equivalent``. None means: it is neither.

    With ``exact``, entries that are patterns do not count.
    """
    for pattern, why in documents()[1][tool].get(kind, {}).items():
        if name == pattern or (not exact and fnmatch(name, pattern)):
            return str(why)
    return None


def last_name(word: str) -> str:
    return word.lstrip("-+").replace("-", "_").rsplit(".", 1)[-1]


def translations(given: Mapping[str, str]) -> str:
    """Return a line with the equivalents of other tools' options in ``given``, or "" without any.

    ``given`` maps names of options to their values.
    """
    tables = dictionary().values()
    rows = {word: next((rows[word] for rows in tables if word in rows), Counterpart("")) for word in given}
    found = {word: answer_of(row, given[word]) or f"use {row.here}" for word, row in rows.items() if row.here}
    listed = ", ".join(f"{word} ({answer.removeprefix('use ')})" for word, answer in found.items())
    return f"\nAlso {listed}; python -m runner.import_config translates a whole file." if listed else ""


def hint_for_value(key: str, value: object) -> str | None:
    """Return what to set instead of ``key=value`` if ``value`` is known from other tools, else None."""
    word = str(value).lower()
    if answer := answers_to(key).get(word):
        return f"{answer}."
    rows = (row for options in dictionary().values() for row in options.values() if row.here == key)
    ours = next((row.values[word] for row in rows if row.values and row.values.get(word)), None)
    return f"use {key}={ours}." if ours else hint_for_layout(word) if key == "parallelism" else None


def hint_for_layout(word: str) -> str | None:
    """Return what to set for a layout whose name lists sizes, such as ``tp4pp2``; None for other words."""
    options = documents()[2]["layouts"]
    if not (match := re.fullmatch(rf"({'|'.join(options)})((?:(?:tp|pp|dp|cp|ep)\d+)+)", word)):
        return None
    sizes = re.findall(r"([a-z]+)(\d+)", match[2])
    words = [options[match[1]], *(f"parallelism.{dimension}={size}" for dimension, size in sizes)]
    return f"use parallelism={' '.join(words)}."


def unknown_key(key: str, source: str, known: Iterable[str], value: str = "") -> ConfigError:
    """Return the error for the unknown ``key``; ``source`` is where it was given, with ``value`` if known."""
    if key in RENAMED:
        return ConfigError(f"{key} ({source}): is {RENAMED[key]} now; use that name.")
    options = sorted(known)
    group, _, name = key.rpartition(".")
    groups = [option.rpartition(".")[0] for option in options if last_name(option) == name]
    misspelt = did_you_mean(key, options) if get_close_matches(group, groups) else None
    hint = misspelt or counterpart(key, value) or reason(key, options)
    in_experiment = source.startswith("conf/experiment/") and group != ""
    if hint is None and in_experiment and not get_close_matches(name, map(last_name, options)):
        hint = f"if another option of {group} reads it, choose that one; otherwise, remove it."
    hint = hint or did_you_mean(key, options)
    if hint.startswith("known: ") and len(options) > MOST_LISTED:
        theirs = [word for rows in dictionary().values() for word in rows]
        near = get_close_matches(last_name(key), theirs, n=1, cutoff=0.85)
        other = reason(key, options, exact=False) or (counterpart(near[0]) if near else None)
        hint = other or (
            "`python -m runner --cfg job` prints all keys, and docs/dictionary.md names other tools' options."
        )
    return ConfigError(f"{key} ({source}): nothing reads this key; {hint}")


def check_long_options(words: Iterable[str]) -> None:
    """Raise ConfigError if a word is ``--OPTION`` of another tool."""
    for word, following in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name == "--config":
            raise ConfigError(f"{name}: is not an option; use python -m runner.import_config TOOL FILE.")
        if name.startswith("--") and (hint := counterpart(name, value if equals else following)):
            raise ConfigError(f"{name}: options are KEY=VALUE, without dashes; {hint}")


def of_values(row: Counterpart) -> str:
    """Return the values that are written in another way here, as the end of a remark."""
    pairs = {theirs: ours for theirs, ours in (row.values or {}).items() if theirs != hydra_value(ours)}
    ours = {
        theirs: "nothing" if value is None else f"`{hydra_value(value)}`" for theirs, value in pairs.items()
    }
    listed = ", ".join(f"{value} for {theirs}" for theirs, value in ours.items())
    return f"{'; ' if row.remark and listed else ''}{listed}"


def page() -> Iterator[str]:
    """Yield the lines of docs/dictionary.md."""
    yield "# Dictionary of other tools' options"
    yield ""
    yield "The options of other training tools, and what they are called here. If you give this program an"
    yield "option of another tool, the error message names the option of this program."
    yield "`python -m runner.import_config llamafactory|axolotl|trl FILE` translates a whole configuration."
    for tool, options in dictionary().items():
        yield from ("", f"## {tool}", "", "| there | here | remark |", "|---|---|---|")
        for word, row in sorted(options.items()):
            yield f"| `{word}` | `{row.here}` | {row.remark}{of_values(row)} |"
    yield from ("", "## Values of options of this program", "", "| given | answer |", "|---|---|")
    for key, answers in documents()[2]["values"].items():
        yield from (f"| `{key}={str(value).lower()}` | {answer} |" for value, answer in answers.items())


if __name__ == "__main__":
    print(*page(), sep="\n")
