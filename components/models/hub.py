"""The files of a saved model: a local folder or a repository of the Hugging Face hub."""

from functools import cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from components.contracts.errors import ConfigError
from components.json_text import one_line, read_json

DESCRIPTION = ("*.json", "*.py", "*.txt", "*.jinja", "*.model")
BIN = "pytorch_model*.bin"

FAILURES: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, HFValidationError)
"""Errors of a download. The first is that of the hub's HTTP client, for example for a lost connection."""

REASONS: tuple[tuple[type[Exception], str], ...] = (
    (GatedRepoError, "gated: accept its licence on the hub, then run hf auth login or set HF_TOKEN"),
    (RepositoryNotFoundError, "the hub has no such model, or it is private and needs HF_TOKEN"),
    (RevisionNotFoundError, "it has no such model.revision"),
    (LocalEntryNotFoundError, "the hub cannot be reached, and there is no copy in its cache"),
    (HFValidationError, "neither a folder nor a valid name of a model on the hub"),
)


def model_folder(option: str, path: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """Return ``path`` if it is a folder, else a local copy of the hub's model ``path`` at ``revision``.

    Without ``weights`` only the small files are downloaded.

    Raises:
        ConfigError: (naming ``option``) if ``path`` is neither, or is a folder and ``revision`` is given.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(
                f"model.revision: {option}={path} is a folder and has no revisions; leave it out."
            )
        return folder
    if folder.exists():
        raise ConfigError(f"{option}={path}: is a file; give the folder it is in.")
    if path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{option}={path}: no such folder; give one, or the id of a model.")
    return download(option, path, revision, weights)


@cache
def download(option: str, repository: str, revision: str | None, weights: bool) -> Path:
    try:
        folder = fetch_snapshot(repository, revision, DESCRIPTION)
        if weights:
            files = weight_files(folder)
            folder = fetch_snapshot(repository, revision, (*DESCRIPTION, *files))
            if not any((folder / file).is_file() for file in files):
                folder = fetch_snapshot(repository, revision, (*DESCRIPTION, BIN))
    except FAILURES as error:
        reason = next((text for kind, text in REASONS if isinstance(error, kind)), one_line(error))
        raise ConfigError(
            f"{option}={repository}: neither a folder nor a model the Hugging Face hub can give ({reason}); "
            "pass the folder of a saved model."
        ) from error
    return folder


def weight_files(folder: Path) -> list[str]:
    """Return the safetensors files that are read if they exist. Others may be copies of the weights."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    named = read_json(index).get("weight_map") if index.is_file() else None
    shards = {file for file in named.values() if isinstance(file, str)} if isinstance(named, dict) else set()
    return [SAFE_WEIGHTS_NAME, *sorted(shards)]


def fetch_snapshot(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
