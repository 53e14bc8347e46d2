"""Code that folders of a model and its tokenizer bring (``model.trust_remote_code``)."""

from collections.abc import Iterable
from pathlib import Path

from components.json_text import read_json

FILES = ("config.json", "tokenizer_config.json")


def brings_code(paths: Iterable[str]) -> bool:
    """Return whether a model or a tokenizer of ``paths`` may have code of its own.

    The result is False only for local folders whose configuration files name no code.
    """
    return any(_may_bring_code(Path(path).expanduser()) for path in paths)


def _may_bring_code(folder: Path) -> bool:
    found = [folder / name for name in FILES if (folder / name).is_file()]
    return not found or any("auto_map" in read_json(file) for file in found)
