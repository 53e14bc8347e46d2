"""Data of TRL."""

from pathlib import Path

from components.contracts.errors import ConfigError
from runner.commands.importing.shared_data import (
    FILES,
    OF_HUB,
    files_of,
    held_out_share,
    lost_parts,
    part_of,
    place,
)
from runner.commands.importing.translation import Translation, as_list


def hub_dataset(work: Translation) -> None:
    """Translate TRL's ``dataset_name`` (a data set of the hub, or a path) and ``dataset_test_split``.

    Raises:
        ConfigError: if ``dataset_name`` is missing.
    """
    name = work.take("dataset_name")
    if work.words["stage"] == "rm":
        work.words["data.long_samples"] = "drop"
    if not work.left.get("packing"):
        work.skip("packing_strategy", "packing is false")
    elif work.words["stage"] != "pt" and work.left.get("packing_strategy") == "wrapped":
        work.lacks("packing_strategy", "samples are packed as a whole")
        work.left |= {"packing_strategy": "bfd"}
    if "datasets" in work.given:
        work.skip("dataset_name", "it is not read with datasets")
        hub_datasets(work)
        return
    if name is None:
        raise ConfigError("dataset_name: the configuration names no data; add it, or the path of a file.")
    split = work.take("dataset_test_split") or "test"
    train = files_of_split(name, work.given.get("dataset_train_split", "train"))
    work.words |= {"data": "files", "data.train": train}
    if not train.startswith("hub:"):
        work.skip("dataset_train_split", "the files of data.train are those of the split")
        if work.take("dataset_config") is not None:
            work.lacks("dataset_config", "only a data set of the hub has subsets; name the files of this one")
    if work.given.get("eval_strategy", "no") != "no":
        evaluated = files_of_split(name, split)
        if train.startswith("hub:"):
            work.words["data.eval_split"] = split
        elif evaluated != train:
            work.words["data.eval"] = evaluated
        else:
            work.checks["data.eval"] = f"{name} has no file of {split}; name one, or give data.eval_fraction"
    else:
        work.skip("dataset_test_split", "eval_strategy is no")


def hub_datasets(work: Translation) -> None:
    """Translate TRL's mixture ``datasets``, all of whose samples are in every epoch."""
    sources = as_list(work.take("datasets"))
    if not all(isinstance(item, dict) and "path" in item for item in sources):
        raise ConfigError("datasets: must be a list of mappings with a path; correct it.")
    entries = [{"path": path} | part_of(item) for item in sources for path in files_of(item)]
    work.words |= {"data": "files", "data.sources": entries}
    for item in sources:
        work.missing |= {f"datasets: {name}": why for name, why in lost_parts(item).items()}
        for name in {*item} - {"path", "data_files", "columns", *OF_HUB.values()}:
            work.missing[f"datasets: {name}={item[name]}"] = "use the options of data, see docs/data.md"
    held_out_share(work, "test_split_size")
    for name in ("dataset_test_split", "dataset_train_split", "dataset_config"):
        work.skip(name, "it is not read with datasets")


def files_of_split(name: object, split: str) -> str:
    """Return the pattern of the files of ``split`` in the folder ``name``, or ``place(name)`` without any."""
    folder = Path(str(name))
    if folder.is_dir() and any(path.suffix in FILES for path in folder.glob(f"{split}*")):
        return str(folder / f"{split}*")
    return place(name)
