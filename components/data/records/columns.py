"""Rename the fields of a record, and the keys and roles of its messages, to the names that formats use."""

import logging
from collections.abc import Iterable, Iterator, Mapping

from components.contracts.json_types import Json
from components.data.records.options import MESSAGE_KEYS, RecordError, RecordOptions

log = logging.getLogger(__name__)

NOT_MESSAGES = ("tools", "chat_template_kwargs")
"""Fields whose objects are not messages, although their keys may have the same names."""


def renamed(record: Mapping[str, object], options: RecordOptions) -> Mapping[str, object]:
    """Return the record with the names that formats use, according to ``data.columns`` and ``data.roles``.

    A renamed field replaces a field that already has the new name. ``unnamed`` lists the replaced fields.
    """
    if not options.columns and not options.roles:
        return record
    fields = {ours: theirs for ours, theirs in options.columns.items() if ours not in MESSAGE_KEYS}
    named = set(fields.values())
    kept = {} if options.only_columns else {key: record[key] for key in record if key not in named}
    given = {ours: record[theirs] for ours, theirs in fields.items() if record.get(theirs) is not None}
    return {
        name: value if name in NOT_MESSAGES else _renamed_messages(value, options)
        for name, value in (kept | given).items()
    }


def unnamed(record: Mapping[str, object], options: RecordOptions) -> list[str]:
    """Return the names of the fields that ``renamed`` leaves out.

    With ``only_columns``, these are the fields that no column names; otherwise, those that a renamed field
    replaces. A key of the messages in a field is returned as ``FIELD[].KEY``.
    """
    if options.only_columns:
        named = set(options.columns.values())
        return [name for name in record if name not in named]
    if not options.columns:
        return []
    of_messages = {ours: theirs for ours, theirs in options.columns.items() if ours in MESSAGE_KEYS}
    of_record = {ours: theirs for ours, theirs in options.columns.items() if ours not in MESSAGE_KEYS}
    found = list(_displaced(record, of_record))
    for name, turns in _messages(record, options):
        keys = dict.fromkeys(key for turn in turns for key in _displaced(turn, of_messages))
        found += [f"{name}[].{key}" for key in keys]
    return found


def _messages(record: Mapping[str, object], options: RecordOptions) -> Iterator[tuple[str, list[Json]]]:
    """Yield the fields that ``renamed`` searches for messages, each with the messages in it."""
    not_messages = {options.columns.get(name, name) for name in NOT_MESSAGES}
    for name, value in record.items():
        if name not in not_messages:
            items = value if isinstance(value, list) else [value]
            yield name, [item for item in items if isinstance(item, dict)]


def _displaced(fields: Mapping[str, object], columns: Mapping[str, str]) -> Iterator[str]:
    """Yield each new name in ``columns`` under which ``fields`` already has a value, which is replaced."""
    for ours, theirs in columns.items():
        has_own = ours not in columns.values() and fields.get(ours) not in (None, "", [], {})
        if fields.get(theirs) is not None and has_own:
            yield ours


def check_columns(records: Iterable[tuple[Mapping[str, object], str]], options: RecordOptions) -> None:
    """Raise RecordError if a field that ``data.columns`` names is in none of ``records`` (with origins).

    Only a warning names a missing key ``train`` of messages, which later records may have. ``read_message``
    refuses messages without a role or content. No more records are read than are needed to find all.
    """
    if options.only_columns:
        return  # optional fields may be missing
    missing = {ours: theirs for ours, theirs in options.columns.items() if ours not in ("role", "content")}
    fields: dict[str, None] = {}
    keys: dict[str, None] = {}
    places: list[str] = []
    for record, origin in records if missing else ():
        fields |= dict.fromkeys(record)
        keys |= dict.fromkeys(
            key for _, turns in _messages(record, options) for turn in turns for key in turn
        )
        missing = {
            ours: theirs
            for ours, theirs in missing.items()
            if theirs not in (keys if ours == "train" else fields)
        }
        if not missing:
            return
        places.append(origin)
    flag = missing.pop("train", None)
    for ours, theirs in missing.items() if places else ():
        raise RecordError(
            f"{places[0]}: data.columns.{ours}: no record from here to {places[-1]} has a field {theirs!r}.\n"
            f"Use one of the fields found: {', '.join(map(str, fields))}."
        )
    if flag is not None and keys:
        log.warning(
            "%s: data.columns.train: no record from here to %s has a message with a key %r; "
            "check the name. The keys found are %s.",
            *(places[0], places[-1], flag, ", ".join(map(str, keys))),
        )


def _renamed_messages(value: object, options: RecordOptions) -> object:
    if isinstance(value, list):
        return [_renamed_message(item, options) if isinstance(item, dict) else item for item in value]
    return _renamed_message(value, options) if isinstance(value, dict) else value


def _renamed_message(message: Json, options: RecordOptions) -> Json:
    keys = {theirs: ours for ours, theirs in options.columns.items() if ours in MESSAGE_KEYS}
    kept = {name: value for name, value in message.items() if name not in keys}
    out = kept | {keys[name]: value for name, value in message.items() if name in keys and value is not None}
    role = out.get("role") or out.get("from")
    if not isinstance(role, str) or role not in options.roles:
        return out
    if not out.get("role"):
        del out["from"]  # it has been read
    return {**out, "role": options.roles[role]}
