"""The source of each key of the composed config, so that an error can name it."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from runner.records.job_record import SweepJob

COMMAND_LINE = "the command line"
CONFIG = "conf/config.yaml"
SELF = "_self_"
_CHOOSING = ("debug", "sweep", "experiment")


_OURS = ("components", "torch.optim")
"""Modules whose classes the config of any run folder may name."""


@dataclass(frozen=True)
class ConfigSources:
    """The inputs of the composition of one config."""

    choices: Mapping[str, str] = field(default_factory=dict)
    """The chosen option of each group."""
    overrides: tuple[str, ...] = ()
    """The overrides of the command line."""
    search_path: tuple[Path, ...] = ()
    """Folders of YAML files; the first has precedence."""
    sweep_job: SweepJob | None = None
    """The run's place in a sweep. None means that it is not part of a sweep."""
    run_folder: Path | None = None
    """The run folder whose config.yaml is the config. None means that this command composed the config."""
    trusted: tuple[str, ...] = ()
    """Modules besides those of ``_OURS`` whose classes the config.yaml of ``run_folder`` may name."""

    def of(self, key: str) -> str:
        """Return the source of the dotted ``key``: the command line, or the file that sets it."""
        if self.run_folder is not None:
            return str(self.run_folder / "config.yaml")
        if (chooser := self._chooser(key)) is not None:
            return chooser
        group, *rest = key.split(".")
        # In a group with several chosen options (logger), each option has its own node.
        group_file = self._file(group, self.choices.get(group) or next(iter(rest), None))
        return display(group_file) if group_file else CONFIG

    def given(self, key: str) -> bool:
        """Return whether the value of ``key`` was set outside of conf/config.yaml."""
        return self.of(key) != CONFIG

    def chosen(self, key: str, groups: Sequence[str] = _CHOOSING) -> bool:
        """Return whether the command line or a file of one of ``groups`` sets ``key``."""
        return self._chooser(key, groups) is not None

    def typed(self, node: str) -> bool:
        """Return whether the command line sets the key or group ``node``, or a key below it."""
        return any(
            f"{name_of(override)}.".startswith(f"{node}.") or sets(override, node)
            for override in self.overrides
        )

    def _chooser(self, key: str, groups: Sequence[str] = _CHOOSING) -> str | None:
        if any(sets(override, key) for override in self.overrides):
            return COMMAND_LINE
        for group in groups:
            file = self._file(group, self.choices.get(group))
            if file is not None and (setter := setter_in(file, key.split("."))) is not None:
                return display(setter)
        return None

    def _file(self, group: str, option: str | None) -> Path | None:
        candidates = (folder / group / f"{option}.yaml" for folder in self.search_path)
        return next((path for path in candidates if path.is_file()), None) if option else None


def is_trusted(path: str, trusted: Iterable[str]) -> bool:
    """Return whether the config of a run folder may name the class or module ``path``.

    It may if ``path`` is in a module of ``_OURS`` or ``trusted``.
    """
    return any(f"{path}.".startswith(f"{module}.") for module in (*_OURS, *trusted))


def name_of(override: str) -> str:
    """Return the key of an override: ``run.x`` for ``+run.x=1``."""
    return override.split("=", maxsplit=1)[0].lstrip("+~")


def sets(override: str, key: str) -> bool:
    """Return whether an override sets the dotted ``key``, by name or in a mapping such as ``run={x: 1}``."""
    name, (_, _, value) = name_of(override), override.partition("=")
    inner = key.removeprefix(f"{name}.")
    if inner == key or not value.startswith("{"):
        return name == key
    return all(re.search(rf"[{{,]\s*{re.escape(part)}\s*:", value) for part in inner.split("."))


def setter_in(file: Path, path: list[str]) -> Path | None:
    """Return the file that sets the key ``path``: ``file``, or one in its folder that its defaults name.

    As in Hydra, the last of the defaults has precedence. ``_self_``, which is the last if it is not named,
    means ``file``.
    """
    node = yaml.safe_load(file.read_text()) or {}
    named = [name for name in node.get("defaults") or [] if isinstance(name, str)]
    for name in reversed(named if SELF in named else [*named, SELF]):
        base = file.parent / f"{name}.yaml"
        if name == SELF and contains(node, path):
            return file
        if name != SELF and base.is_file() and (found := setter_in(base, path)) is not None:
            return found
    return None


def contains(node: object, path: list[str]) -> bool:
    if not path:
        return True
    return isinstance(node, Mapping) and path[0] in node and contains(node[path[0]], path[1:])


def display(path: Path) -> str:
    """Return the last three parts of a path, such as conf/optimizer/adamw.yaml."""
    return "/".join(path.parts[-3:])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?``, or the list of known words if none is similar.

    A key with the same last part is preferred: for ``model.dtype``, ``run.dtype``.
    """
    options = sorted(known)
    same = [option for option in options if option.rpartition(".")[2] == word.rpartition(".")[2]]
    near = difflib.get_close_matches(word, same or options, n=1, cutoff=0.0 if same else 0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(options)}."
