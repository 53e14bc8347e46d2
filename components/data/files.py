"""The user's own data: files, and data sets of the Hugging Face hub."""

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from math import inf
from typing import Literal, get_args

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError, check_at_least_one
from components.contracts.json_types import Json
from components.data.config import Data
from components.data.data_sources import STAGES, FileSource, HubSource, RecordSource, Source
from components.data.mixture import Shares, StoppingStrategy, parse_blend
from components.data.records.hub_records import HubDataset
from components.data.records.options import MESSAGE_KEYS, Format, RecordOptions
from components.data.records.record_files import Record
from components.data.store.indexed import indexed_prefix
from components.data.stream.chunks import split_buffer

BUFFER_SIZE = 10_000
"""Default of ``data.buffer_size``, the number of records of a stream that are shuffled together."""
OF_STRINGS = frozenset({"prompt_completion", "preference", "unpaired"})
"""Formats whose prompts and answers ``data.strings`` makes turns of."""
_HUB = "hub:"
_OF_HUB = ("subset", "split", "revision")
"""Options that select a part of a data set of the hub."""
_SOURCE_KEYS = ("path", "repeats", "share", "format", "columns", "max_samples", *_OF_HUB)
_LACKS = {
    "alpaca": "has no messages",
    "alpaca and segments": "has no messages",
    "indexed": "is tokens already",
    "segments": "has no messages and uses no chat template",
}
"""Formats -> why some options have no effect on data of these formats."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class RecordsData(Data):
    """The options that all data made of records has: files, and data sets of LLaMA-Factory."""

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

    def convert(self, record: Record) -> Record:
        """Return ``record`` in one of the formats.

        A subclass may override this method to read records of any other form.
        """
        return record

    def converting(self, source: RecordSource) -> RecordSource:
        """Return ``source``, with ``convert`` applied to its records if a subclass overrides that method."""
        is_own = type(self).convert is not RecordsData.convert
        return replace(source, convert=self.convert) if is_own else source

    def check_kind(self, kind: SampleKind) -> None:
        super().check_kind(kind)
        options = self.record_options()
        given = {
            "default_system": self.default_system is not None,
            "chat_template_kwargs": bool(self.chat_template_kwargs),
            "strings": self.strings != "plain",
            "roles": bool(options.roles),
            **{f"columns.{key}": key in options.columns for key in MESSAGE_KEYS},
        }
        for name in (name for name, unread in given.items() if unread and kind == "text"):
            raise ConfigError(f"data.{name}: a document has no turns; leave it out with stage=pt.")
        if self.mask_history and self.train_on_prompt:
            raise ConfigError(
                "data.mask_history: data.train_on_prompt=true trains on every turn; set one of the two to "
                "false."
            )
        if self.mask_history and kind != "chat":
            raise ConfigError(
                f"data.mask_history: with stage={STAGES[kind]} there are no earlier turns to train on; "
                "leave it out."
            )

    def check_formats(self, formats: Collection[str]) -> None:
        if self.strings != "plain" and OF_STRINGS.isdisjoint(formats):
            raise ConfigError(
                f"data.strings: the records are {' and '.join(sorted(formats))}, and it affects only "
                f"{', '.join(sorted(OF_STRINGS))}; leave it out, or correct data.format."
            )
        options, given = self.record_options(), dict[str, bool]()
        if {*formats} == {"indexed"}:
            given |= {name: bool(getattr(options, name)) for name in ("columns", "ignore_fields")}
            given |= {"on_bad_record": self.on_bad_record != "stop"}
        if {*formats} <= {"alpaca", "segments"}:
            given |= {f"columns.{key}": key in options.columns for key in MESSAGE_KEYS}
            given |= {"roles": bool(options.roles)}
        if {*formats} == {"segments"}:
            given |= {
                "default_system": self.default_system is not None,
                "mask_history": self.mask_history,
                "chat_template_kwargs": bool(self.chat_template_kwargs),
            }
        for name in (name for name, unread in given.items() if unread):
            known = " and ".join(sorted(formats))
            raise ConfigError(
                f"data.{name}: has no effect on {known} data, which {_LACKS[known]}; leave it out."
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
            train_on_prompt=self.train_on_prompt,
        )


@dataclass(frozen=True, kw_only=True)
class FilesData(RecordsData):
    """A user's files or data sets, named by either ``train`` or ``sources``."""

    train: str | None = None
    sources: list[Json] | str | None = None
    """A list of mappings with the keys ``_SOURCE_KEYS``, or text like ``0.7 A 0.3 B``."""
    stopping_strategy: StoppingStrategy = "first_exhausted"
    eval: str | dict[str, str] | None = None
    """One path, or a mapping from the name of each evaluation set to its path."""
    columns: dict[str, str] | None = None
    roles: dict[str, str] | None = None
    split: str | None = None
    eval_split: str | None = None
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.train is None) == (self.sources is None):
            have = "both are given" if self.train is not None else "both are null"
            raise ConfigError(f"data.train, data.sources: {have}; give one of them, as data.train=PATH.")
        if self.eval == "":
            raise ConfigError("data.eval: is empty; give a path, or leave it out.")
        if (self.eval or self.eval_split) and self.eval_fraction:
            raise ConfigError("data.eval_fraction: is not read if data.eval names a file; remove one.")
        if self.sources == []:
            raise ConfigError("data.sources: is empty; give at least one {path: FILE}.")
        for index, source in enumerate(self._sources):
            _check_source(f"data.sources[{index}]", source)
            _check_part(f"data.sources[{index}]", source)
        self._check_shares()
        for name in self._evaluated:
            if isinstance(self.eval, dict) and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"data.eval: {name!r} is not a name for an evaluation set; use letters, digits, '.', '_' "
                    "and '-'."
                )
        self._check_streaming()
        self.record_options()  # raises if columns or roles has an unknown name
        self._check_hub_options()

    @cached_property
    def _sources(self) -> list[Json]:
        if isinstance(self.sources, str):
            return parse_blend("data.sources", self.sources)
        return self.sources or []

    @cached_property
    def _evaluated(self) -> Mapping[str, str]:
        """The path of each evaluation set by its name, which is empty for a single set."""
        if isinstance(self.eval, dict):
            return self.eval
        path = self.train if self.eval is None and self.eval_split is not None else self.eval
        return {} if path is None else {"": path}

    def _check_shares(self) -> None:
        with_share = ["share" in source for source in self._sources]
        if any(with_share) and not all(with_share):
            raise ConfigError("data.sources: some have a share and others none; give every source a share.")
        if self.stopping_strategy != "first_exhausted" and not any(with_share):
            raise ConfigError(
                "data.stopping_strategy: is only read with shares; give every one of data.sources a share, "
                "or leave it out."
            )

    def _check_streaming(self) -> None:
        if not self.streaming:
            if self.buffer_size is not None:
                raise ConfigError(
                    "data.buffer_size: is only read with data.streaming=true; set that, or remove it."
                )
            return
        check_at_least_one("data", self, "buffer_size")
        unread = {
            "eval_fraction": (bool(self.eval_fraction), "give evaluation data in data.eval"),
            "drop_last": (self.drop_last, "remove it: every batch of a stream is whole"),
            "stopping_strategy": (
                self.stopping_strategy != "first_exhausted",
                "remove it: a source that ends begins again",
            ),
            "sources": (any("repeats" in source for source in self._sources), "give sources a share"),
        }
        for name, (given, remedy) in unread.items():
            if given:
                raise ConfigError(f"data.{name}: a stream (data.streaming) has no epochs; {remedy}.")
        paths = [self.train] if self.train is not None else [source["path"] for source in self._sources]
        for path in paths:
            if not path.startswith(_HUB) and indexed_prefix(path) is not None:
                raise ConfigError(
                    f"data.streaming: {path} is an indexed data set, which is memory-mapped instead of "
                    "streamed; leave data.streaming out."
                )
        self.records_per_chunk()

    def _check_hub_options(self) -> None:
        evaluated = self._evaluated.values()
        if self.eval_split is not None and not any(path.startswith(_HUB) for path in evaluated):
            raise ConfigError(
                "data.eval_split: is a split of data.eval, else of data.train; give one of them as hub:NAME, "
                "or remove it."
            )
        own = self.eval is not None and any(path.startswith(_HUB) for path in evaluated)
        splits = ["data.split"] if self.split is not None else []
        splits += [
            f"data.sources[{i}].split" for i, source in enumerate(self._sources) if source.get("split")
        ]
        if own and splits and self.eval_split is None:
            raise ConfigError(
                f"data.eval_split: {splits[0]} is that of the training data; name the split of data.eval, "
                "too."
            )
        trained = [{"path": self.train}] if self.train is not None else self._sources
        for name in (name for name in _OF_HUB if getattr(self, name) is not None):
            own_eval = name == "split" and self.eval_split is not None
            reading = [*trained, *({"path": path} for path in evaluated if not own_eval)]
            hub = [source for source in reading if source["path"].startswith(_HUB)]
            if not hub:
                raise ConfigError(
                    f"data.{name}: only data sets of the hub have one; use data.train=hub:NAME, or "
                    "remove it; data.max_samples and data.eval_fraction take a part of a file."
                )
            if all(name in source for source in hub):
                raise ConfigError(f"data.{name}: every data set of the hub has its own; remove it.")

    def record_options(self) -> RecordOptions:
        return replace(
            super().record_options(), columns=dict(self.columns or {}), roles=dict(self.roles or {})
        )

    def train_sources(self) -> Sequence[tuple[Source, float]]:
        if self.streaming:  # only what the first chunk has
            return [
                (replace(source, max_samples=min(int(records), source.max_samples or sys.maxsize)), 1.0)
                for source, records in zip(self.streamed_sources(), self.records_per_chunk(), strict=True)
            ]
        repeats = [float(source.get("repeats", 1.0)) for source in self._sources] or [1.0]
        return list(zip(self._named_sources(), repeats, strict=True))

    def streamed_sources(self) -> Sequence[RecordSource]:
        return [replace(source, streaming=True) for source in self._named_sources()] if self.streaming else []

    def records_per_chunk(self) -> tuple[float, ...]:
        shares = [float(source.get("share", 1.0)) for source in self._sources] or [1.0]
        return split_buffer(self.buffer_size or BUFFER_SIZE, shares)

    def _named_sources(self) -> list[RecordSource]:
        if self.train is not None:
            return [self._source("data.train", {"path": self.train})]
        return [self._source(f"data.sources[{i}]", source) for i, source in enumerate(self._sources)]

    def mixture(self) -> Shares | None:
        if self.streaming:
            return None  # every chunk is mixed
        values = [float(source["share"]) for source in self._sources if "share" in source]
        return Shares(values, self.stopping_strategy) if values else None

    def eval_sources(self) -> Mapping[str, Source]:
        return {
            f"eval/{name}".rstrip("/"): self._eval_source(f"data.eval.{name}".rstrip("."), path)
            for name, path in self._evaluated.items()
        }

    def _eval_source(self, option: str, path: str) -> RecordSource:
        source = self._source(option, {"path": path, "split": self.eval_split or self.split})
        # ``datasets`` would download all splits of the repository, but it streams no part of a split.
        streamed = self.streaming and isinstance(source, HubSource) and "[" not in source.dataset.split
        return replace(source, streaming=streamed)

    def _source(self, option: str, source: Json) -> RecordSource:
        path: str = source["path"]
        own = {name: source[name] for name in ("format", "columns") if name in source}
        options = replace(self.record_options(), **own)
        limit = self.max_eval_samples if option.startswith("data.eval") else self.max_samples
        limits = [number for number in (limit, source.get("max_samples")) if number is not None]
        limit = min(limits, default=None)
        if not path.startswith(_HUB):
            return self.converting(FileSource(option=option, path=path, options=options, max_samples=limit))
        subset, split, revision = (source.get(name, getattr(self, name)) for name in _OF_HUB)
        dataset = HubDataset(option, path.removeprefix(_HUB), subset, split or "train", revision)
        return self.converting(HubSource(option=option, dataset=dataset, options=options, max_samples=limit))


def _check_source(where: str, source: Json) -> None:
    for key in source:
        if key == "weight":
            raise ConfigError(f"{where}.weight: is called repeats since version 0.2.0; use {where}.repeats.")
        if key not in _SOURCE_KEYS:
            near = get_close_matches(key, _SOURCE_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(_SOURCE_KEYS)}."
            if key in ("train", "sources"):
                hint = "use path."
            elif key in (option.name for option in fields(FilesData)):
                scope = "" if "eval" in key else ", which holds for all sources"
                hint = f"use data.{key}{scope}."
            raise ConfigError(f"{where}.{key}: nothing reads this key; {hint}")
    if not isinstance(source.get("path"), str):
        raise ConfigError(f"{where}.path: must be a path, got {source.get('path')!r}.")
    if "share" in source and "repeats" in source:
        raise ConfigError(f"{where}.share: says how often an epoch contains the source; remove repeats.")
    for key, example in (("repeats", "1: once per epoch"), ("share", "0.3: 30 % of an epoch")):
        value = source.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise ConfigError(f"{where}.{key}: must be a number above 0 ({example}), got {value!r}.")
    limit = source.get("max_samples")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"{where}.max_samples: must be a whole number above 0, got {limit!r}.")
    columns = source.get("columns", {})
    if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns.values()):
        raise ConfigError(f"{where}.columns: must be a mapping of names, got {columns!r}.")
    known = ("auto", *get_args(Format))
    if source.get("format", "auto") not in known:
        raise ConfigError(f"{where}.format: {source['format']!r} is not one of {', '.join(known)}.")


def _check_part(where: str, source: Json) -> None:
    is_hub = source["path"].startswith(_HUB)
    for name in (name for name in _OF_HUB if source.get(name) is not None):
        if not isinstance(source[name], str):
            raise ConfigError(f"{where}.{name}: must be text, got {source[name]!r}; put it in quotes.")
        if not is_hub:
            raise ConfigError(
                f"{where}.{name}: only data sets of the hub have one; use path: hub:NAME, or remove it."
            )
    if source.get("columns") and not is_hub and indexed_prefix(source["path"]) is not None:
        raise ConfigError(
            f"{where}.columns: has no effect on indexed data, which {_LACKS['indexed']}; remove it."
        )
