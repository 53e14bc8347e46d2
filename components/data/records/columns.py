"""Rename the fields of a record, and the keys and roles of its messages, to the names that formats use."""

from collections.abc import Mapping

from components.contracts.json_types import Json
from components.data.records.options import MESSAGE_KEYS, RecordError, RecordOptions


def renamed(record: Mapping[str, object], options: RecordOptions) -> Mapping[str, object]:
    """Return the record with the names of the formats, according to ``data.columns`` and ``data.roles``."""
    if not options.columns and not options.roles:
        return record
    fields = {ours: theirs for ours, theirs in options.columns.items() if ours not in MESSAGE_KEYS}
    named = set(fields.values())
    kept = {} if options.only_columns else {key: record[key] for key in record if key not in named}
    given = {ours: record[theirs] for ours, theirs in fields.items() if theirs in record}
    return {name: _renamed_messages(value, options) for name, value in (kept | given).items()}


def unnamed(record: Mapping[str, object], options: RecordOptions) -> list[str]:
    """Return the fields that ``renamed`` leaves out because no column names them."""
    named = set(options.columns.values())
    return [name for name in record if name not in named] if options.only_columns else []


def check_columns(record: Mapping[str, object], options: RecordOptions, origin: str) -> None:
    """Raise RecordError if ``record``, the first of a source, lacks a field that ``data.columns`` names."""
    if options.only_columns:
        return  # optional fields may be missing
    for ours, theirs in options.columns.items():
        if ours not in MESSAGE_KEYS and theirs not in record:
            raise RecordError(
                f"{origin}: data.columns.{ours}: the record has no field {theirs!r}.\n"
                f"Use one of its fields: {', '.join(map(str, record))}."
            )


def _renamed_messages(value: object, options: RecordOptions) -> object:
    if isinstance(value, list):
        return [_renamed_message(item, options) if isinstance(item, dict) else item for item in value]
    return _renamed_message(value, options) if isinstance(value, dict) else value


def _renamed_message(message: Json, options: RecordOptions) -> Json:
    keys = {theirs: ours for ours, theirs in options.columns.items() if ours in MESSAGE_KEYS}
    out = {keys.get(name, name): value for name, value in message.items()}
    role = out.get("role") or out.get("from")
    return {**out, "role": options.roles[role]} if isinstance(role, str) and role in options.roles else out
