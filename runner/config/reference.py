"""The page of all configuration keys: ``python -m runner.config.reference conf > docs/configuration.md``.

Defaults and descriptions are read from the YAML files and the comments in them, types from the classes that
read the keys.
"""

import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml

from components.contracts.json_types import Json
from components.targets import described
from runner.config.instantiate import GROUPS, NAMED, NODES

OPTION_GROUPS = (*GROUPS, *NAMED, "debug", "experiment", "sweep", "hydra/launcher", "hydra/sweeper")
LINE = re.compile(r"( *)(?:(\w+):(?: +(?!#)\S.*?)?)?(?:(?:^| *)# (.*))?")
"""Indentation, key and comment of a line. The value between them contains no " # "."""
READERS = {"hydra_plugins.runner_sweeps.slurm.SlurmLauncher": "runner.sweeps.slurm.sbatch.SbatchOptions"}
"""Class that passes all its arguments on -> the class that defines the arguments."""
INTRODUCTION = """# Configuration

Every key with its default, its type and its description, from the files of `conf/` and the classes that read
them. `python -m runner.config.reference conf > docs/configuration.md` writes this page.

An option is chosen by `GROUP=OPTION` and a key is set by `KEY=VALUE`, as in `optimizer=sgd optimizer.lr=0.1`.
`${optimizer.lr}` stands for the value of another key, `${unless:${A},B,C}` for B, or for C (else null) if the
key A is set. `python -m runner --cfg job` prints all keys of a command with their values."""
TABLE_HEAD = ("", "| key | default | type or allowed values | description |", "|---|---|---|---|")
TYPES: Mapping[object, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "`true`, `false`",
    NoneType: "`null`",
    Any: "value",
    object: "value",
}


@dataclass(frozen=True)
class OptionFile:
    """The content of a file of conf/, and what it inherits from the option that it extends."""

    own: Json
    """The keys that the file itself sets, with their values."""
    header: str
    """The comment at the beginning of the file."""
    comments: Mapping[str, str]
    """The descriptions of the file's own and inherited keys, by dotted key."""
    target: str | None
    """The ``_target_``, own or inherited. None means that the file sets keys of other nodes."""
    base: str | None
    """The option that the file extends. None means that it extends none."""


def read_option(path: Path) -> OptionFile:
    """Read a file of conf/.

    The description of a key is the comment next to it, or else the lines above it.
    """
    own = yaml.safe_load(path.read_text())
    bases = [name for name in own.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    inherited = read_option(path.with_name(f"{bases[0]}.yaml")) if bases else None
    comments = dict(inherited.comments) if inherited else {}
    header: list[str] = []
    above: list[str] = []
    names: dict[int, str] = {}
    for line in path.read_text().splitlines():
        found = LINE.fullmatch(line)
        indent, key, comment = found.groups() if found else ("", None, None)
        if key is None:
            above = [*above, comment] if comment and not comment.startswith("@package") else []
            continue
        if names:
            comment = comment or " ".join(above)
        else:
            header = [f"`{words.strip()}`" if words.startswith(" ") else words for words in above]
        names = {depth: name for depth, name in names.items() if depth < len(indent)} | {len(indent): key}
        if comment:
            comments[".".join(names.values())] = comment
        above = []
    target = own.get("_target_") or (inherited.target if inherited else None)
    return OptionFile(own, "\n".join(header), comments, target, bases[0] if inherited else None)


def type_words(hint: object) -> str:
    """Return the allowed values of a type, or its name."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    if is_dataclass(hint):
        return "mapping"
    parts = ", ".join(dict.fromkeys(type_words(part) for part in arguments if part is not ...))
    return f"list of {parts}" if origin in (list, tuple) else parts or TYPES[hint]


def as_written(value: object) -> str:
    """Return a value as it is written in YAML and on the command line."""
    lines = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).splitlines()
    return f"`{lines[0]}`"  # a document with only a scalar has a second line, "..."


def rows(prefix: str, node: Json, reader: object, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield a row for each key of ``node``, and for each key of its values whose type is a dataclass.

    Keys of such a value follow its own row.
    """
    hints = typing.get_type_hints(reader.__init__ if inspect.isclass(reader) else reader)
    for name, value in node.items():
        key = f"{prefix}.{name}"
        if name == "_target_":
            continue
        hint = hints.get(name, object)  # arguments of a torch optimizer class have no checked type
        below = is_dataclass(hint) or (name == "architecture" and value)
        default = "below" if below else as_written(value)
        words = comments.get(key, "").replace("|", r"\|")
        yield f"| `{key}` | {default} | {type_words(hint)} | {words} |"
        if is_dataclass(hint):
            yield from rows(key, value, hint, comments)


def table(prefix: str, node: Json, reader: object, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the Markdown table of a node, and a YAML block with a model's ``architecture``, if it has one."""
    described = {f"{prefix}.{key}": words for key, words in comments.items()}
    if lines := list(rows(prefix, node, reader, described)):  # adapter=none has no keys
        yield from (*TABLE_HEAD, *lines)
    if shape := node.get("architecture"):
        yield from ("", "```yaml", yaml.safe_dump({"architecture": shape}, sort_keys=False) + "```")


def option_section(path: Path, group: str, name: str) -> Iterator[str]:
    """Yield the heading of an option of a config group, and the table of its keys.

    Only the keys that its own file sets are listed, not those that it inherits.
    """
    option = read_option(path)
    yield from ("", f"### `{group}={name}`", "", option.header)
    if group in NAMED:
        ((name, node),) = option.own.items()
        comments = {key.removeprefix(f"{name}."): words for key, words in option.comments.items()}
        yield from table(f"{group}.{name}", node, pkgutil.resolve_name(node["_target_"]), comments)
    elif option.target is None:
        yield from ("", "```yaml", re.sub(r"\A(#.*\n)+", "", path.read_text()) + "```")
    else:
        if option.base:
            others = ", with these values:" if len(option.own) else "."
            yield from ("", f"All keys of `{group}={option.base}`{others}")
        reader = described(pkgutil.resolve_name(READERS.get(option.target, option.target)))
        yield from table(group.replace("/", "."), option.own, reader, option.comments)


def page(conf: Path) -> Iterator[str]:
    """Yield the lines of docs/configuration.md."""
    config = read_option(conf / "config.yaml")
    defaults = yaml.safe_load((conf / "config.yaml").read_text())["defaults"]
    chosen = {key: value for item in defaults if isinstance(item, dict) for key, value in item.items()}
    yield INTRODUCTION
    for name, reader in NODES.items():
        inner = {key.removeprefix(f"{name}."): words for key, words in config.comments.items()}
        yield from ("", f"## `{name}`", *table(name, config.own[name], reader, inner))
    for group in OPTION_GROUPS:
        folder = conf / group
        yield from ("", f"## `{group}`", "", f"The default is {as_written(chosen.get(group, 'basic'))}.")
        for path in sorted(folder.rglob("*.yaml")):
            yield from option_section(path, group, path.relative_to(folder).with_suffix("").as_posix())


if __name__ == "__main__":
    print(*page(Path(sys.argv[1])), sep="\n")
