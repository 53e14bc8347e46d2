"""Data as LLaMA-Factory describes it: a folder with a dataset_info.json and the files that it names.

The rules are those of LLaMA-Factory's ``data/README.md``: the default columns and tags, and that ``columns``,
if given, names all fields that are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from math import inf
from pathlib import Path

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json
from components.data.data_sources import FileSource, HubSource, Source
from components.data.files import RecordsData
from components.data.mixture import Shares, StoppingStrategy
from components.data.records.hub_records import HubDataset
from components.data.records.options import Format, RecordOptions
from components.home import expand_home
from components.json_text import read_json

_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""LLaMA-Factory's name of a column -> this program's name of the field."""
_OTHER = ("history", "system", "tools", "images", "videos", "audios", "chosen", "rejected", "kto_tag")
_DEFAULT_COLUMNS = {**_ALPACA, "messages": "conversations"}
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
"""LLaMA-Factory's tag for a role -> LLaMA-Factory's default name of the role, and this program's name."""
_OTHER_HUBS = ("ms_hub_url", "om_hub_url")
_ENTRY_KEYS = (
    *("file_name", "hf_hub_url", *_OTHER_HUBS, "formatting", "ranking", "subset", "split"),
    *("folder", "num_samples", "columns", "tags"),
    "file_sha1",  # of earlier versions of LLaMA-Factory, which only warned if the file was another one
)


@dataclass(frozen=True, kw_only=True)
class LlamaFactoryData(RecordsData):
    """Data sets of a dataset_info.json, by their names."""

    dataset_info: str | None = None
    """The folder of dataset_info.json, or the file."""
    dataset: str | tuple[str, ...] | None = None
    """Names of the training data sets, as a list or separated by commas."""
    shares: list[float] | None = None
    stopping_strategy: StoppingStrategy = "first_exhausted"
    eval_dataset: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_info is None or self.dataset is None:
            raise ConfigError(
                "data.dataset_info, data.dataset: give both, LLaMA-Factory's data folder and the names of "
                "data sets in its dataset_info.json."
            )
        if self.eval_dataset is not None and self.eval_fraction:
            raise ConfigError("data.eval_fraction: is not read if data.eval_dataset is given; remove one.")
        if self.format != "auto":
            raise ConfigError("data.format: dataset_info.json names the format; leave it out.")
        self._check_shares()
        self.train_sources()  # raises if an entry is missing or not supported
        self.eval_sources()

    def _check_shares(self) -> None:
        if self.shares is None:
            if self.stopping_strategy != "first_exhausted":
                raise ConfigError(
                    "data.stopping_strategy: is only read with shares; give data.shares, or leave it out."
                )
            return
        names = _names(self.dataset)
        if len(self.shares) != len(names):
            raise ConfigError(
                f"data.shares: has {len(self.shares)} number(s), but data.dataset {len(names)} name(s); "
                "give one for each."
            )
        if not all(0 < share < inf for share in self.shares):
            raise ConfigError(f"data.shares: must be numbers above 0, got {self.shares}; correct them.")

    def mixture(self) -> Shares | None:
        return None if self.shares is None else Shares(self.shares, self.stopping_strategy)

    def train_sources(self) -> Sequence[tuple[Source, float]]:
        names = _names(self.dataset)
        if not names:
            raise ConfigError("data.dataset: names no data set; give one of dataset_info.json.")
        return [(self._source("data.dataset", name), 1.0) for name in names]

    def eval_sources(self) -> Mapping[str, Source]:
        names = _names(self.eval_dataset)
        keys = ["eval"] if len(names) == 1 else [f"eval/{name}" for name in names]
        return {key: self._source("data.eval_dataset", name) for key, name in zip(keys, names, strict=True)}

    @cached_property
    def _file(self) -> Path:
        given = Path(expand_home("data.dataset_info", str(self.dataset_info)))
        return given / "dataset_info.json" if given.is_dir() else given

    @cached_property
    def _entries(self) -> Json:
        if not self._file.is_file():
            raise ConfigError(
                f"data.dataset_info: {self._file} is not a file; give LLaMA-Factory's data folder."
            )
        return read_json(self._file)

    def _source(self, option: str, name: str) -> Source:
        entry, where = self._entry(option, name), f"{self._file}: {name}"
        for key in entry:
            if key not in _ENTRY_KEYS:
                raise ConfigError(f"{where}.{key}: is not supported; remove it, or use data=files.")
        options, named = self._options(entry, where), f"{option}[{name}]"
        limit = self.max_samples if option == "data.dataset" else self.max_eval_samples
        limits = [number for number in (limit, entry.get("num_samples")) if number]
        limit = min(limits) if limits else None
        if "hf_hub_url" in entry:
            split = entry.get("split") or "train"
            repo, folder = entry["hf_hub_url"], entry.get("folder")
            dataset = HubDataset(named, repo, entry.get("subset"), split, folder=folder)
            hub = HubSource(option=named, dataset=dataset, options=options, max_samples=limit)
            return self.converting(hub)
        if "file_name" not in entry:
            other = next((f"{key}, which is not read, but " for key in _OTHER_HUBS if key in entry), "")
            raise ConfigError(f"{where}: names {other}no file_name and no hf_hub_url; add one of them.")
        for key, default in (("split", "train"), ("subset", None), ("folder", None)):
            if entry.get(key) not in (None, default):
                raise ConfigError(f"{where}.{key}: a file has none; remove it, or name a file for each.")
        path = str(self._file.parent / entry["file_name"])
        return self.converting(FileSource(option=named, path=path, options=options, max_samples=limit))

    def _entry(self, option: str, name: str) -> Json:
        entry = self._entries.get(name)
        if not isinstance(entry, dict):
            near = get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(self._entries)[:10])}."
            raise ConfigError(f"{option}: {self._file} describes no data set {name!r}; {hint}")
        return entry

    def _options(self, entry: Json, where: str) -> RecordOptions:
        formatting, columns = entry.get("formatting", "alpaca"), entry.get("columns", _DEFAULT_COLUMNS)
        if formatting not in ("alpaca", "sharegpt", "openai"):
            raise ConfigError(
                f"{where}.formatting: {formatting!r} is not alpaca, sharegpt or openai; use one of them."
            )
        chat = formatting != "alpaca"
        fields = {name: columns[name] for name in _OTHER if columns.get(name)}
        format = _format(entry, columns, chat=chat)
        if chat:
            fields["conversations"] = columns.get("messages") or "conversations"
        elif format == "text":
            fields["text"] = columns.get("prompt") or "text"
        else:
            fields |= {ours: columns[theirs] for theirs, ours in _ALPACA.items() if columns.get(theirs)}
        tags = entry.get("tags", {})
        if chat:
            fields |= {"role": tags.get("role_tag", "from"), "content": tags.get("content_tag", "value")}
        roles = {tags.get(tag, default): role for tag, (default, role) in _TAGS.items()} if chat else {}
        return replace(self.record_options(), format=format, columns=fields, roles=roles, only_columns=True)


def _names(given: str | tuple[str, ...] | None) -> list[str]:
    words = given.split(",") if isinstance(given, str) else given or ()
    return [word.strip() for word in words if word.strip()]


def _format(entry: Json, columns: Json, *, chat: bool) -> Format:
    if entry.get("ranking"):
        return "preference"
    if columns.get("kto_tag"):
        return "unpaired"
    if chat:
        return "sharegpt"
    return "alpaca" if columns.get("response") else "text"
