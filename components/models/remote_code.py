"""Code that a folder of a model brings (``model.trust_remote_code``)."""

from pathlib import Path

from components.json_text import read_json


def brings_code(path: str | None) -> bool:
    """Return whether the model at ``path`` may have code of its own.

    False needs a local folder whose configuration names none. The files of a hub id are not read.
    """
    folder = Path(path or "").expanduser()
    if path is None or not (folder / "config.json").is_file():
        return True
    files = (folder / name for name in ("config.json", "tokenizer_config.json"))
    return any("auto_map" in read_json(file) for file in files if file.is_file())
