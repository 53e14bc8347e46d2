"""Data of users: files, and data sets of the Hugging Face hub."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import inf
from typing import Literal, get_args

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.config import Data
from components.data.data_sources import STAGES, FileSource, HubSource, Source
from components.data.records.hub_records import HubDataset
from components.data.records.options import Format, RecordOptions

_HUB = "hub:"
_SOURCE_KEYS = ("path", "repeats", "format", "columns", "max_samples")


@dataclass(frozen=True, kw_only=True)
class RecordsData(Data):
    """The options of data that is made of records."""

    eval_fraction: float = 0.0
    format: Literal["auto"] | Format = "auto"
    ignore_fields: list[str] = field(default_factory=list)
    strings: Literal["plain", "chat"] = "plain"
    default_system: str | None = None
    mask_history: bool = False
    chat_template_kwargs: Json | None = None
    on_bad_record: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                f"data.eval_fraction: must be at least 0 and below 1, got {self.eval_fraction}."
            )

    def held_out_fraction(self) -> float:
        return self.eval_fraction

    def check_kind(self, kind: SampleKind) -> None:
        super().check_kind(kind)
        given = {
            "default_system": self.default_system is not None,
            "chat_template_kwargs": bool(self.chat_template_kwargs),
            "strings": self.strings != "plain",
        }
        for name in (name for name, unread in given.items() if unread and kind == "text"):
            raise ConfigError(f"data.{name}: a document has no turns; leave it out with stage=pt.")
        if self.mask_history and kind != "chat":
            raise ConfigError(
                f"data.mask_history: with stage={STAGES[kind]} there are no earlier turns to train on; "
                "leave it out."
            )

    def record_options(self) -> RecordOptions:
        return RecordOptions(
            format=self.format,
            ignore_fields=tuple(self.ignore_fields),
            strings=self.strings,
            default_system=self.default_system,
            mask_history=self.mask_history,
            chat_template_kwargs=dict(self.chat_template_kwargs or {}),
            on_bad_record=self.on_bad_record,
        )


@dataclass(frozen=True, kw_only=True)
class FilesData(RecordsData):
    """A user's files or data sets, named by either ``train`` or ``sources``."""

    train: str | None = None
    sources: list[Json] | None = None
    """One ``{path, repeats = 1, format, columns, max_samples}`` per source."""
    eval: str | None = None
    columns: dict[str, str] | None = None
    roles: dict[str, str] | None = None
    split: str | None = None
    eval_split: str | None = None
    subset: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.train is None) == (self.sources is None):
            have = "both are given" if self.train is not None else "both are null"
            raise ConfigError(f"data.train, data.sources: {have}; give one of them, as data.train=PATH.")
        if (self.eval or self.eval_split) and self.eval_fraction:
            raise ConfigError("data.eval_fraction: is not read if data.eval names a file; remove one.")
        if self.sources == []:
            raise ConfigError("data.sources: is empty; give at least one {path: FILE}.")
        for index, source in enumerate(self.sources or []):
            _check_source(f"data.sources[{index}]", source)
        self.record_options()  # raises if a name in columns or roles is not one
        self._check_hub_options()

    def _check_hub_options(self) -> None:
        if self.eval_split is not None and not (self.eval or self.train or "").startswith(_HUB):
            raise ConfigError(
                "data.eval_split: is a split of data.eval, else of data.train; give one of them as hub:NAME, "
                "or remove it."
            )
        paths = [self.train, self.eval, *(source["path"] for source in self.sources or [])]
        hub = [path for path in paths if path is not None and path.startswith(_HUB)]
        for name in ("split", "eval_split", "subset", "revision"):
            if getattr(self, name) is not None and not hub:
                raise ConfigError(
                    f"data.{name}: only data sets of the hub have one; use data.train=hub:NAME, or remove it."
                )

    def record_options(self) -> RecordOptions:
        return replace(
            super().record_options(), columns=dict(self.columns or {}), roles=dict(self.roles or {})
        )

    def train_sources(self) -> Sequence[tuple[Source, float]]:
        if self.train is not None:
            return [(self._source("data.train", {"path": self.train}), 1.0)]
        return [
            (self._source(f"data.sources[{i}]", source), float(source.get("repeats", 1.0)))
            for i, source in enumerate(self.sources or [])
        ]

    def eval_source(self) -> Source | None:
        if self.eval is None and self.eval_split is None:
            return None
        path = self.train if self.eval is None else self.eval
        return self._source("data.eval", {"path": path}, split=self.eval_split)

    def _source(self, option: str, source: Json, split: str | None = None) -> Source:
        path: str = source["path"]
        own = {name: source[name] for name in ("format", "columns") if name in source}
        options = replace(self.record_options(), **own)
        limit = source.get(
            "max_samples", self.max_eval_samples if option == "data.eval" else self.max_samples
        )
        if not path.startswith(_HUB):
            return FileSource(option=option, path=path, options=options, max_samples=limit)
        repo = path.removeprefix(_HUB)
        dataset = HubDataset(option, repo, self.subset, split or self.split or "train", self.revision)
        return HubSource(option=option, dataset=dataset, options=options, max_samples=limit)


def _check_source(where: str, source: Json) -> None:
    for key in source:
        if key not in _SOURCE_KEYS:
            near = get_close_matches(key, _SOURCE_KEYS, n=1) or [", ".join(_SOURCE_KEYS)]
            raise ConfigError(f"{where}.{key}: nothing reads this key; did you mean {near[0]}?")
    if not isinstance(source.get("path"), str):
        raise ConfigError(f"{where}.path: must be a path, got {source.get('path')!r}.")
    repeats = source.get("repeats", 1.0)
    if isinstance(repeats, bool) or not isinstance(repeats, int | float) or not 0 < repeats < inf:
        raise ConfigError(f"{where}.repeats: must be a number above 0 (1: once per epoch), got {repeats!r}.")
    known = ("auto", *get_args(Format))
    if source.get("format", "auto") not in known:
        raise ConfigError(f"{where}.format: {source['format']!r} is not one of {', '.join(known)}.")
