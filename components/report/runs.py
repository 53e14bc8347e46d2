"""Reading a run folder, which may be incomplete."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import yaml

from components.contracts.json_types import Json
from components.contracts.status import current_status
from components.json_text import as_type, parse_json
from components.report.curves import Curve, current_names, read_curves
from components.yaml_text import parse_yaml

T = TypeVar("T")
Sample = list[tuple[str, bool]]
"""The decoded pieces of a training sample, and whether the tokens of each piece are trained on."""

LAST_LINES = 20
TAIL_BYTES = 16384
MOST_LETTERS = 100
MOST_COMPLETIONS = 20
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG_FACTS = ("data", "identity", "results", "command", "overrides", "versions", "sweep", "began")
"""Keys of run.json that are shown elsewhere or not at all."""


@dataclass(frozen=True)
class ShownResults:
    """The fields of ``results`` in run.json that the page reads."""

    last: dict[str, float] = field(default_factory=dict)
    diverged: bool = False


@dataclass(frozen=True)
class ShownFacts:
    """The fields of run.json that the page reads one by one."""

    ended: str | None = None
    error: str | None = None
    overrides: tuple[str, ...] = ()
    results: ShownResults | None = None
    versions: Json = field(default_factory=dict)
    mfu_peak: str | None = None
    resumed_from: str | None = None


FORECAST = "forecast"
"""Status of a folder with only a forecast, a rehearsal or a proof."""


@dataclass(frozen=True)
class Entry:
    """One run of the page, with the facts known to the program that started it."""

    number: int
    folder: Path | None
    """The run folder. None means that the run was rejected before it had one."""
    arguments: Sequence[str] | None = None
    """Arguments of the command that starts the run by itself. None means that they are not known."""
    overrides: tuple[str, ...] | None = None
    """Overrides of the run. None means those in run.json."""
    status: str | None = None
    """Status of the run. None means the status in run.json."""
    loss: float | None = None
    error: str | None = None
    seconds: float | None = None


@dataclass
class RunPage:
    """The data of one run on the page; ``missing`` lists what could not be read, and why."""

    entry: Entry
    facts: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    """Dotted key -> value, for example ``optimizer.lr``."""
    audit: Json | None = None
    preflight: Json | None = None
    samples: list[Sample] = field(default_factory=list)
    completions: Json = field(default_factory=dict)
    """The last completions of prompts: file -> rows."""
    curves: dict[str, Curve] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    """File -> last lines, if the run is not completed."""
    missing: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        status = self.entry.status or self.facts.get("ended") or "unfinished"
        return "unfinished" if status == "running" else str(current_status(status))

    @property
    def error(self) -> str | None:
        return self.entry.error or self.facts.get("error")

    @property
    def overrides(self) -> dict[str, str]:
        """Overrides of the command line: key -> value as typed."""
        words = self.entry.overrides
        if words is None:
            words = self.facts.get("overrides", ())
        pairs = (word.lstrip("+").partition("=") for word in words)
        return {key: value for key, _, value in pairs}

    @property
    def name(self) -> str:
        name = self.config.get("run.name") or self.overrides.get("run.name")
        return f"run {self.entry.number}" if name is None else str(name)

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last evaluation was not finite."""
        return bool((self.facts.get("results") or {}).get("diverged"))

    @property
    def results(self) -> dict[str, float]:
        """Last value of each metric, from its curve or else from run.json."""
        kept = (self.facts.get("results") or {}).get("last", {})
        names = current_names(kept)
        found = {names[key]: value for key, value in kept.items()}
        ended = found.get("step", 0.0)  # the logger may have written no later rows than these
        found |= {key: curve.last for key, curve in self.curves.items() if curve.last_step >= ended}
        if self.diverged:  # an older evaluation is not the result
            found = {key: value for key, value in found.items() if not key.startswith("eval/")}
        if self.facts.get("mfu_peak") is None:  # without the peak rate, this number has no meaning
            found.pop("perf/mfu", None)
        return found

    @property
    def group(self) -> tuple[str, bool]:
        """Stage and data of the final loss, which group runs for a ranking, and whether both are known."""
        found = (kind for kind in ("eval", "train") if f"{kind}/loss" in self.results)
        kind = "eval" if self.diverged else next(found, None)
        if kind is None:
            return "without a loss", False
        splits = [split for name, split in (self.audit or {}).items() if name.partition("/")[0] == kind]
        sources = [source for split in splits if split for source in split.get("sources", [])]
        counted = "{name}, {samples} samples, {supervised} targets"
        sizes = [counted.format_map(defaultdict(str, source)) for source in sources]
        stage, kind_of_sample = (self.config.get(f"stage.{key}") for key in ("_target_", "kind"))
        names = [str(stage or "unknown stage").rpartition(".")[2], *filter(None, [kind_of_sample])]
        data = f"{kind}/loss on {'; '.join(sizes) or 'unknown data'}"
        return f"{' '.join(map(str, names))}: {data}", bool(stage and sizes)

    @property
    def stage_options(self) -> Json:
        """Options of the stage, without ``stage.reference``: all its sources give the same loss."""
        found = {key: value for key, value in self.config.items() if key.startswith("stage.")}
        return {key: value for key, value in found.items() if key != "stage.reference"}

    @property
    def steps(self) -> float | None:
        """The last logged step."""
        ends = [curve.last_step for curve in self.curves.values()]
        return max(ends, default=self.results.get("step"))


def is_forecast(folder: Path) -> bool:
    return (folder / "preflight.json").is_file() and not (folder / "run.json").is_file()


def read_run(entry: Entry, points: int) -> RunPage:
    """Read the files of a run, reducing each curve to ``points`` means at most.

    ``missing`` lists the files that are absent or cannot be read.
    """
    run = RunPage(entry)
    if entry.folder is None:
        return run
    if not entry.folder.is_dir():
        run.missing.append(f"{entry.folder} is not there any more")
        return run

    folder = entry.folder

    def part(name: str, read: Callable[[Path], T]) -> T | None:
        try:
            return read(folder / name)
        except FileNotFoundError:
            run.missing.append(f"no {name}")
        except (OSError, ValueError, yaml.YAMLError) as error:
            run.missing.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
        return None

    if is_forecast(folder):
        run.config = dict(flat("", part("config.yaml", read_yaml) or {}))
        run.preflight = part("preflight.json", read_json_object)
        return run
    run.facts = part("run.json", read_facts) or {}
    run.config = dict(flat("", part("config.yaml", read_yaml) or {}))
    run.audit = part("audit.json", read_audit)
    run.preflight = part("preflight.json", read_json_object)
    run.samples = part("samples.json", read_samples) or []
    last = {path.parent: path for path in sorted(folder.glob("completions/**/step_*.jsonl"))}
    names = [str(path.relative_to(folder)) for path in last.values()]
    run.completions = {name: part(name, read_completions) or [] for name in names}
    point = run.facts.get("resumed_from")
    # A restart in the run's own folder continues metrics.jsonl.
    resumed = point is not None and Path(point).parent.parent.resolve() != folder.resolve()
    run.curves = part("metrics.jsonl", partial(read_curves, count=points, resumed=resumed)) or {}
    if run.facts.get("mfu_peak") is None:
        run.curves.pop("perf/mfu", None)
    if run.status != "completed":
        run.logs = failure_excerpt(folder)
    return run


def read_json_object(path: Path) -> Json:
    return as_type(Json, parse_json(path.read_text()))


def read_facts(path: Path) -> Json:
    """Return the content of run.json; raise ValueError if a field that the page shows has another type."""
    found = read_json_object(path)
    as_type(ShownFacts, found)
    return found


def read_audit(path: Path) -> Json:
    """Return the content of audit.json; raise ValueError if its sources are not tables."""
    found = read_json_object(path)
    for split in found.values():
        if isinstance(split, dict):
            as_type(list[Json], split.get("sources", []))
    return found


def read_samples(path: Path) -> list[Sample]:
    return as_type(list[Sample], parse_json(path.read_text()))


def read_completions(path: Path) -> list[Json]:
    lines = path.read_text().removesuffix("\n").split("\n")  # a completion may have other separators of lines
    return [as_type(Json, parse_json(line)) for line in lines[:MOST_COMPLETIONS]]


def read_yaml(path: Path) -> Json:
    found = parse_yaml(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("holds no mapping")
    return found


def flat(prefix: str, node: object) -> list[tuple[str, object]]:
    """Return dotted keys with their values; a list is a value."""
    if not isinstance(node, Mapping) or not node:
        return [(prefix, node)] if prefix else []
    return [pair for key, value in node.items() for pair in flat(f"{prefix}.{key}".lstrip("."), value)]


def fact_tables(facts: Json) -> dict[str, Json]:
    """Return run.json as tables of two columns, without values that are too long."""
    kept = {key: value for key, value in facts.items() if key not in LONG_FACTS and value is not None}
    short = {key: value for key, value in flat("", kept) if len(json.dumps(value)) <= MOST_LETTERS}
    return {"run": short, "versions": facts.get("versions", {})} if facts else {}


def failure_excerpt(folder: Path) -> dict[str, str]:
    """Return the errors of ranks and the last lines of their logs, by file."""
    found = {}
    for path in sorted(folder.glob("logs/error_*.json")):
        try:
            found[path.name] = last_lines(as_type(str, read_json_object(path).get("text", "")).strip(" :"))
        except (OSError, ValueError):
            continue  # a rank was killed while writing it
    for path in [folder / "train.log", *sorted(folder.glob("logs/rank_*.log"))]:
        if path.is_file() and (words := tail(path)):
            found[path.name] = words
    return found


def tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
        return last_lines(file.read().decode(errors="replace"))


def last_lines(text: str) -> str:
    return "\n".join(COLOURS.sub("", text).splitlines()[-LAST_LINES:])
