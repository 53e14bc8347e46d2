"""Places of data, held-out shares and the prompts of Alpaca, for several tools."""

from pathlib import Path

from components.contracts.json_types import Config, Json
from runner.commands.importing.translation import Translation, as_list

FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")
KINDS_OF_FILES = ("json", "csv", "parquet", "text")
"""Values of the ``path`` of a data set that the library ``datasets`` reads from files."""
OF_HUB = {"split": "split", "subset": "name", "revision": "revision"}
"""Our option of a data set of the hub -> the key of an entry of ``datasets``."""
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request."
)
"""The first paragraph of a prompt of Stanford Alpaca without an input."""


def place(name: object) -> str:
    """Return ``name`` unchanged if it is a path, or as ``hub:NAME`` if it is a data set of the hub."""
    text = str(name)
    is_path = text.startswith((".", "/", "~")) or Path(text).suffix in FILES or Path(text).exists()
    return text if is_path else f"hub:{text}"


def files_of(item: Config) -> list[str]:
    """Return the sources of an entry of ``datasets``: its files, or a data set of the hub.

    ``path`` may be a kind of file, and those of ``data_files`` are then on this machine.
    """
    if item.get("data_files") and ("ds_type" in item or item["path"] in KINDS_OF_FILES):
        return [str(path) for path in as_list(item["data_files"])]
    return [str(item["path"]) if "ds_type" in item else place(item["path"])]


def part_of(item: Config) -> Json:
    """Return the split, subset and revision of an entry that is a data set of the hub; {} for files."""
    of_hub = files_of(item)[0].startswith("hub:")
    return {ours: item[theirs] for ours, theirs in OF_HUB.items() if of_hub and item.get(theirs)}


def lost_parts(item: Config) -> dict[str, str]:
    """Return the keys of an entry that select a part of it and are lost, with what happens instead."""
    if not files_of(item)[0].startswith("hub:"):
        found = {key: item[key] for key in OF_HUB.values() if item.get(key) not in (None, "train")}
        why = "only a data set of the hub has one; name its files"
        return {f"{key}={value}": why for key, value in found.items()}
    if not item.get("data_files"):
        return {}
    return {f"data_files={item['data_files']}": "all of its files are read; name them in data.sources"}


def held_out_share(work: Translation, name: str) -> None:
    share = work.number(name) or 0.0
    if share >= 1:
        work.lacks(name, "use data.eval_fraction, a share below 1")
    elif share:
        work.words["data.eval_fraction"] = share


def check_template(work: Translation) -> None:
    """Add a note on ``model.chat_template``, which the tokenizer may have, or may lack the tokens of."""
    rows = " adapter.modules_to_save=[embed_tokens,lm_head]" if "adapter" in work.words else ""
    work.checks["model.chat_template"] = (
        "leave it out if the tokenizer has this template itself; if it lacks special tokens of the template, "
        f"add model.add_tokens=true{rows}"
    )


def write_alpaca(work: Translation, difference: str) -> None:
    """Choose the prompts of Stanford Alpaca, which have one template and one system text."""
    work.words["model.chat_template"] = "plain"
    if work.words["stage"] != "pt":
        work.words.setdefault("data.default_system", ALPACA_SYSTEM)
    work.checks["model.chat_template"] = difference
