"""Which file a key of the composed config came from, so that an error can name it."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from runner.sweeps.job_record import SweepJob

COMMAND_LINE = "the command line"
CONFIG = "conf/config.yaml"


@dataclass(frozen=True)
class ConfigSources:
    """What the composition of one config was made of."""

    choices: Mapping[str, str] = field(default_factory=dict)
    """group -> chosen option."""
    overrides: tuple[str, ...] = ()
    """Of the command line, as typed."""
    search_path: tuple[Path, ...] = ()
    """Folders of YAML files, the first has precedence."""
    sweep_job: SweepJob | None = None
    """The run's place in a sweep; None: it stands for itself."""

    def of(self, key: str) -> str:
        """Where ``key`` (dotted) got its value: the command line, an experiment file, or its group's file."""
        if any(name_of(override) == key for override in self.overrides):
            return COMMAND_LINE
        experiment = self._file("experiment", self.choices.get("experiment"))
        if experiment is not None and contains(yaml.safe_load(experiment.read_text()), key.split(".")):
            return display(experiment)
        group, *rest = key.split(".")
        # Of a group from which several options are taken, each has its node.
        group_file = self._file(group, self.choices.get(group) or next(iter(rest), None))
        return display(group_file) if group_file else CONFIG

    def given(self, key: str) -> bool:
        """Whether someone chose its value, on the command line or in an experiment file."""
        return self.of(key) != CONFIG

    def _file(self, group: str, option: str | None) -> Path | None:
        candidates = (folder / group / f"{option}.yaml" for folder in self.search_path)
        return next((path for path in candidates if path.is_file()), None) if option else None


def name_of(override: str) -> str:
    """``+run.x=1`` -> ``run.x``"""
    return override.split("=", maxsplit=1)[0].lstrip("+~")


def contains(node: object, path: list[str]) -> bool:
    if not path:
        return True
    return isinstance(node, Mapping) and path[0] in node and contains(node[path[0]], path[1:])


def display(path: Path) -> str:
    """The last three parts: conf/optimizer/adamw.yaml"""
    return "/".join(path.parts[-3:])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?``, or else what there is to choose from."""
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"known: {', '.join(options)}."
