"""Records of data sets that the ``datasets`` library loads: from the Hugging Face hub, or from a folder."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contracts.errors import ConfigError
from components.data.records.record_files import Item, Reading, Records, without_media, without_nulls
from components.json_text import one_line

log = logging.getLogger(__name__)

_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError)  # of ``datasets``, besides its own class

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class HubDataset:
    """A data set that ``datasets`` loads, with the subset, split and revision to read."""

    option: str
    """The option that names the data set, for messages."""
    repo: str
    subset: str | None = None
    split: str = "train"
    """A split, or a part of one in the notation of ``datasets``: ``train[:90%]``."""
    revision: str | None = None
    folder: str | None = None
    """The folder in the data set's repository that is read. None means the whole repository."""

    @property
    def name(self) -> str:
        part = "".join(f", {name}" for name in (self.subset, self.folder) if name is not None)
        return f"hub:{self.repo} ({self.split}{part})"

    @property
    def local(self) -> Path | None:
        """The path if the data set is a folder or a file here, and not on the hub."""
        path = Path(self.repo)
        return path if path.exists() else None

    def fingerprint(self) -> str:
        """Return the fingerprint of the data set from ``datasets``, which changes with its content."""
        return str(self._load()._fingerprint)

    def records(self, *, streaming: bool = False) -> Records:
        """Return the records; with ``streaming`` they are fetched while they are read."""
        dataset = self._load(streaming=streaming)
        reading = Reading(1)
        reading.begin(1)
        return Records(self._items(dataset, reading), reading)

    def _items(self, dataset: "Dataset | IterableDataset", reading: Reading) -> Iterator[Item]:
        from datasets.exceptions import DatasetsError

        row = 0
        try:
            for row, record in enumerate(without_media(dataset), start=1):
                if hasattr(dataset, "__len__"):
                    reading.at_row(row, len(dataset))
                yield without_nulls(record), f"hub:{self.repo}:{row}"
        except (*_ERRORS, DatasetsError) as error:
            raise ConfigError(
                f"{self.option}: hub:{self.repo} cannot be read after row {row} ({one_line(error)}).\n"
                "Check the network and the files of the data set, or choose another data.revision."
            ) from error

    def commit(self) -> str | None:
        """Return the commit that ``revision`` names now.

        None means that the records come from a folder here or, without network, from the cache.

        Raises:
            ConfigError: if the hub does not name a commit.
        """
        import datasets

        found = None if self.local is not None else current_commit(self.repo, self.revision)
        if found is None and self.local is None and not datasets.config.HF_HUB_OFFLINE:
            raise ConfigError(
                f"{self.option}: the hub names no commit of hub:{self.repo}; check the name and "
                "data.revision."
            )
        return found

    def version(self) -> str:
        """Return the commit of the data set, or a digest that changes with the files of a folder.

        No record is read.
        """
        return str(self._call("load_dataset_builder").hash)

    def _load(self, *, streaming: bool = False) -> "Dataset | IterableDataset":
        """Return the data set.

        ``datasets`` downloads it unless its cache holds it; with ``streaming`` it fetches records while they
        are read.
        """
        return self._call("load_dataset", split=self.split, streaming=streaming)

    def _call(self, function: str, **options: object) -> Any:
        """Return what a function of ``datasets`` returns for this data set.

        Raises:
            ConfigError: if it cannot be loaded, for example because the data set, its subset or its split
                does not exist, or there is no network.
        """
        import datasets  # takes half a second, and only this source needs it

        if self.local is not None and self.revision is not None:
            raise ConfigError(
                f"data.revision: {self.option}=hub:{self.repo} is local and has no revisions; leave it out, "
                "or give it to other entries of data.sources."
            )
        if self.local is None:
            current_commit(self.repo, self.revision)  # finds out whether the hub can be reached
        try:
            loaded = getattr(datasets, function)(
                self.repo, self.subset, data_dir=self.folder, revision=self.revision, **options
            )
        except (*_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(
                f"{self.option}: hub:{self.repo} cannot be loaded ({one_line(error)}).\n"
                "Check the name, the subset, the split and the network, or give a file."
            ) from error
        return loaded


@cache
def current_commit(repo: str, revision: str | None) -> str | None:
    """Return the commit that ``revision`` names on the hub. None means that the hub has not named one.

    If the hub cannot be reached, ``datasets`` reads only its cache from here on; it would try for half a
    minute.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if datasets.config.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(repo, revision=revision, expand=["sha"], timeout=10).sha
    except (HfHubHTTPError, HFValidationError):
        return None  # ``datasets`` explains the hub's answer
    except Exception as error:  # the class is that of the HTTP library, which varies
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if not kinds & {"OSError", "RequestError", "ValueError"}:
            raise
        log.warning("hub: cannot be reached (%s), so only its cache is read", one_line(error))
        datasets.config.HF_HUB_OFFLINE = True
    return None
