"""Data of axolotl."""

from collections.abc import Callable, Mapping
from typing import Any

from components.contracts.errors import ConfigError
from components.contracts.json_types import Config
from runner.commands.importing.shared_data import (
    OF_HUB,
    check_template,
    files_of,
    held_out_share,
    lost_parts,
    part_of,
    write_alpaca,
)
from runner.commands.importing.translation import Translation, as_list

FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "input_output": "segments"}
"""Type of an axolotl data set -> our format. Types that begin with ``chat_template`` are not among them."""
TEMPLATES = ("chatml", "llama3")
"""Types of pairs of answers begin with one of these, a dot, and the name of the fields: ``chatml.intel``."""
REWARD = "bradley_terry.chat_template"
"""The type of pairs of axolotl's reward models, with the fields of ``icr``."""
COLUMNS_OF_PAIRS = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
}
"""Name of the fields of a type of pairs -> ``data.columns``. Others have our names."""


def axolotl_datasets(work: Translation) -> None:
    """Translate axolotl's ``datasets`` and ``test_datasets``.

    Raises:
        ConfigError: if ``datasets`` is empty, or an entry is not a mapping with a path.
    """
    sources, tests = as_list(work.take("datasets")), as_list(work.take("test_datasets"))
    if streamed := as_list(work.take("pretraining_dataset")):
        sources = [streamed_source(item) for item in streamed]
        work.words["data.streaming"] = True
    if not sources or not all(isinstance(item, dict) and "path" in item for item in [*sources, *tests]):
        raise ConfigError("datasets: must be a list of mappings with a path; correct it.")
    varied = [
        key for key in OF_A_SOURCE if any(ENTRIES[key](item) != ENTRIES[key](sources[0]) for item in sources)
    ]
    entries = [
        {"path": path} | {key: value for key in varied if (value := ENTRIES[key](item))}
        for item in sources
        for path in files_of(item)
    ]
    paths = [entry["path"] for entry in entries]
    work.words["data"] = "files"
    work.words |= {"data.train": paths[0]} if len(paths) == 1 else {"data.sources": entries}
    of_each = {theirs for ours, theirs in OF_HUB.items() if ours in varied}  # not those of test data
    axolotl_tests(work, tests, {key: value for key, value in sources[0].items() if key not in of_each})
    for key in (key for key in ENTRIES if key not in varied):
        found = [ENTRIES[key](item) for item in sources]
        if any(other != found[0] for other in found):
            work.missing[f"datasets: {key}"] = f"data.{key} holds for all sources; convert the others"
        if found[0]:
            work.words[f"data.{key}"] = found[0]
    for item in sources:
        work.missing |= {f"datasets: {name}": why for name, why in (lost_parts(item) | lost(item)).items()}
        if isinstance(item.get("type"), str) and format_of(item) is None and template_of(item) is None:
            work.checks["data.format"] = f"type {item['type']} is not known; the format is recognised"
    if all(item.get("type") == "alpaca" for item in sources) and "chat_template" not in work.given:
        write_alpaca(
            work,
            "for a record with an input, axolotl has another first paragraph and a heading '### Input:'; "
            "here the input is below the instruction",
        )
    elif any(item.get("type") == "alpaca" for item in sources):
        work.checks["model.chat_template"] = (
            "axolotl writes '### Instruction:' before the turns of alpaca; here a chat template does"
        )
    held_out_share(work, "val_set_size")
    axolotl_rows(work, sources)


def streamed_source(item: Any) -> Any:
    """Return an entry of ``pretraining_dataset`` as one of ``datasets``."""
    if not isinstance(item, dict):
        return {"path": item, "type": "completion"}
    kept = {name: value for name, value in item.items() if name not in ("text_column", "type")}
    return kept | {"type": "completion", "field": item.get("text_column")}


def axolotl_rows(work: Translation, sources: list[Any]) -> None:
    """Translate how rows are made of documents, and of pairs whose type names a chat template."""
    if work.words["stage"] == "pt":
        work.take("sample_packing", "excess_length_strategy")
        work.words["data.packing"] = "concat"
        work.checks["data.packing"] = (
            "axolotl cuts a long document into pieces; here all documents are joined and cut every "
            "data.max_length tokens, so that an epoch may have another number of steps"
        )
    elif any(item.get("type") == "completion" for item in sources):
        work.checks["data.format"] = (
            f"stage={work.words['stage']} does not train on documents (completion); write each one as "
            "{segments: [{text: DOCUMENT, label: true}]}, with the end-of-sequence token at its end"
        )
    named = {template for item in sources if (template := template_of(item))}
    if named or any(item.get("type") == REWARD for item in sources):
        work.words["data.strings"] = "chat"
        if work.words["stage"] == "kto":  # its records have a completion
            entries = as_list(work.words.get("data.sources"))
            for columns in (work.words.get("data.columns", {}), *(e.get("columns", {}) for e in entries)):
                for name in ("chosen", "rejected"):
                    columns.pop(name, None)
        if named and "chat_template" not in work.given:
            work.words["model.chat_template"] = named.pop()
            check_template(work)


def axolotl_tests(work: Translation, tests: list[Any], trained: Config) -> None:
    """Translate axolotl's ``test_datasets``, given an entry of the data that is trained on."""
    evaluated = [path for item in tests for path in files_of(item)]
    if len(evaluated) == 1:
        work.words["data.eval"] = evaluated[0]
    elif evaluated:
        work.words["data.eval"] = {f"test{number}": path for number, path in enumerate(evaluated)}
    for item in tests:
        work.missing |= {f"test_datasets: {name}": why for name, why in lost_parts(item).items()}
    default = "train" if trained.get("split") else None  # data.split names that of the trained data
    of_hub = [item for item in tests if any(path.startswith("hub:") for path in files_of(item))]
    splits = {item.get("split") or default for item in of_hub}
    if len(splits) == 1 and None not in splits:
        work.words["data.eval_split"] = splits.pop()
    elif len(splits) > 1:
        work.missing["test_datasets: split"] = "data.eval_split holds for all of data.eval"
    for key in (key for key in ENTRIES if key != "split"):
        if any(ENTRIES[key](item) != ENTRIES[key](trained) for item in tests):
            work.missing[f"test_datasets: {key}"] = f"data.{key} holds for all data; convert the files"


FIELDS = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
"""Our names of fields. The option ``field_NAME`` of an entry gives the name of the field in the records."""
READ = {"path", "data_files", "ds_type", "type", "split", "name", "revision", "field", "field_messages"}
READ |= {"message_field_role", "message_field_content", "message_field_training"}
READ |= {"message_property_mappings", "roles"}
READ |= {f"field_{key}" for key in FIELDS}
"""The keys of an entry of ``datasets`` that are read, or have no effect."""
USUAL: Mapping[str, tuple[Any, ...]] = {
    "roles_to_train": ([], ["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",),
    "chat_template": ("tokenizer_default",),
}
"""Other keys of an entry -> their values for which no option is needed here."""
UNREAD = {
    "roles_to_train": "the turns of the assistant are trained on",
    "train_on_eos": "the token that ends a turn of the assistant is trained on",
    "chat_template": "model.chat_template is that of all data",
}
"""Keys of ``USUAL`` -> the rule that applies here, which is reported for any other value."""


def lost(item: Config) -> dict[str, str]:
    """Return the keys of an entry of ``datasets`` without an equivalent, each with the reason or remedy."""
    found = {}
    detailed = item["type"] if isinstance(item.get("type"), dict) else {}
    for name, value in detailed.items():
        if name not in READ and value is not None:
            found[f"type.{name}={value}"] = "write it in the records, or in a chat template"
    for name, value in item.items():
        if name not in READ and value is not None and value not in USUAL.get(name, ()):
            found[f"{name}={value}"] = UNREAD.get(name, "use the options of data, see docs/data.md")
    for ours, theirs in (item.get("message_property_mappings") or {}).items():
        if ours not in ("role", "content") and theirs != ours:
            found[f"message_property_mappings.{ours}={theirs}"] = f"rename the key to {ours} in the records"
    return found


def template_of(item: Config) -> str | None:
    """Return the chat template that the type of an entry names, such as ``chatml`` of ``chatml.intel``."""
    template, dot, _ = str(item.get("type") or "").partition(".")
    return template if dot and template in TEMPLATES else None


def format_of(item: Config) -> str | None:
    kind = str(item.get("type") or "")
    if kind == REWARD:
        return "preference"
    if kind.startswith("chat_template"):
        return "preference" if kind != "chat_template" else "messages"
    return FORMATS.get(kind)


def columns_of(item: Config) -> dict[str, object]:
    """Return ``data.columns`` for an entry of axolotl's ``datasets``: our name of a field -> the record's.

    Fields whose two names are equal are left out.
    """
    mapped = item.get("message_property_mappings") or {}
    detailed = item["type"] if isinstance(item.get("type"), dict) else item
    found = {
        "text": item.get("field"),
        "messages": item.get("field_messages"),
        "role": mapped.get("role", item.get("message_field_role")),
        "content": mapped.get("content", item.get("message_field_content")),
        "train": item.get("message_field_training"),
        **{key: detailed.get(f"field_{key}") for key in FIELDS},
        **(COLUMNS_OF_PAIRS.get(str(item["type"]).partition(".")[2], {}) if template_of(item) else {}),
        **(COLUMNS_OF_PAIRS["icr"] if item.get("type") == REWARD else {}),
    }
    return {ours: theirs for ours, theirs in found.items() if theirs not in (None, ours)}


def roles_of(item: Config) -> dict[str, str]:
    """Return ``data.roles`` (name of a role in the records -> role) from axolotl's list of names per role."""
    roles = item.get("roles") or {}
    return {theirs: ours for ours, names in roles.items() for theirs in as_list(names) if theirs != ours}


ENTRIES: Mapping[str, Callable[[Config], Any]] = {
    "format": format_of,
    "columns": columns_of,
    "roles": roles_of,
    "split": lambda item: part_of(item).get("split"),
    "subset": lambda item: part_of(item).get("subset"),
    "revision": lambda item: part_of(item).get("revision"),
}
"""Key of the group ``data`` -> the function that returns its value for an entry of ``datasets``."""
OF_A_SOURCE = ("format", "columns", *OF_HUB)
"""Keys of ``ENTRIES`` that each of ``data.sources`` may have."""
