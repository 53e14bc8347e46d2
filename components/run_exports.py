"""Exports of runs, for messages about a folder that is a run or contains runs."""

from pathlib import Path

EXPORTS = ("export", "*/export", "*/*/export")
"""Patterns of exports in a run folder, in the runs of one name, and in the runs of all names."""


def hint_for_run(folder: Path) -> str:
    """Return a sentence that names the export of the newest run in ``folder``; "" if there is none.

    If ``folder`` is an adapter, the sentence says which options continue its training.
    """
    if (folder / "adapter_config.json").is_file():
        return (
            f" It is an adapter: use adapter=lora adapter.path={folder}, with its base model in model.path."
        )
    paths = (path for pattern in EXPORTS for path in folder.glob(pattern))
    found = [path for path in paths if (path.parent / "run.json").is_file()]
    newest = max(found, key=lambda path: path.parent.name, default=None)
    return "" if newest is None else f" A run exported its model to {newest}; use that."
