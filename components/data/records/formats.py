"""Convert records of users to four kinds of sample. Every error message names the record's origin."""

from collections.abc import Mapping
from typing import Literal, get_args

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.data.records.messages import alpaca_prompt, checked, read_string, read_tools, read_turns
from components.data.records.preference_records import read_preference, read_unpaired
from components.data.records.samples import ChatSample, Sample, TextSample

Format = Literal["text", "alpaca", "sharegpt", "messages", "preference", "unpaired"]

KINDS: Mapping[Format, SampleKind] = {
    "text": "text",
    "alpaca": "chat",
    "sharegpt": "chat",
    "messages": "chat",
    "preference": "preference",
    "unpaired": "unpaired",
}
"""The kind of sample that each format holds."""

_MARKS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("unpaired", ("completion", "label")),
    ("unpaired", ("kto_tag",)),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("text", ("text",)),
)
"""The keys that identify a format. The first format whose keys are all present is chosen."""


def detect(record: Mapping[str, object], origin: str) -> Format:
    """Detect the format by the fields that are present.

    Raises:
        ConfigError: if the fields match no known format.
    """
    for name, keys in _MARKS:
        if all(record.get(key) is not None for key in keys):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _MARKS)
    raise ConfigError(
        f"{origin}: data.format=auto does not recognise a record with fields {', '.join(map(str, record))}.\n"
        f"Rename the fields to one of ({known}), or name the format in data.format."
    )


def normalize(record: Mapping[str, object], format: Format, origin: str) -> Sample:
    """Convert one record to a sample.

    Raises:
        ConfigError: if a field is missing, a type is wrong, or roles are out of order.
    """
    assert format in get_args(Format), format
    if format == "text":
        return TextSample(read_string(record, "text", origin))
    if format == "preference":
        return read_preference(record, origin)
    if format == "unpaired":
        return read_unpaired(record, origin)
    if format == "alpaca":
        answer = {"role": "assistant", "content": read_string(record, "output", origin)}
        turns = [*alpaca_prompt(record, origin), answer]
    else:
        turns = read_turns(record, "messages" if format == "messages" else "conversations", origin)
    return ChatSample(checked(turns, origin), read_tools(record, origin))
