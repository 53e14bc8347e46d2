"""Find the fields of a record that its format does not read, so that none is dropped silently."""

import re
from collections.abc import Iterable, Iterator, Mapping

from components.contracts.errors import ConfigError
from components.data.records.messages import (
    REASONING_KEYS,
    begins_with_system,
    ends_without_an_answer,
    training_flags,
)
from components.data.records.options import Format, RecordError, RecordOptions

_QUESTION = ("instruction", "prompt", "input", "query", "history")
_ALWAYS = ("system", "tools", "chat_template_kwargs")
_READ: Mapping[Format, tuple[str, ...]] = {
    "text": ("text",),
    "segments": ("segments",),
    "prompt_completion": ("prompt", "completion", *_ALWAYS),
    "alpaca": (*_QUESTION, "output", "response", *_ALWAYS),
    "messages": ("messages", *_ALWAYS),
    "sharegpt": ("conversations", *_ALWAYS),
    "preference": (
        *("messages", "conversations", "chosen", "rejected", "chosen_messages", "rejected_messages"),
        *(*_QUESTION, *_ALWAYS),
    ),
    "unpaired": (
        *("messages", "conversations", "completion", "output", "response", "label", "kto_tag"),
        *(*_QUESTION, *_ALWAYS),
    ),
}
_EMPTY: tuple[object, ...] = (None, "", [], {})
_PROMPTS = ("prompt", "conversations", "messages", "instruction")
"""Fields that may hold the prompt in preference and unpaired data. Only the first that is present is read."""
_ALTERNATIVES: Mapping[Format, tuple[tuple[str, str], ...]] = {
    "alpaca": (("instruction", "prompt"), ("input", "query"), ("output", "response")),
    "preference": (("chosen", "chosen_messages"), ("chosen", "rejected_messages"), ("input", "query")),
    "unpaired": (("label", "kto_tag"), ("output", "response"), ("input", "query")),
}
"""Pairs of fields the second of which is read only if a record does not have the first one."""
_UP_TO_AN_ANSWER: Mapping[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("completion",),
    "unpaired": ("messages", "conversations"),
}
"""Fields with a conversation, of which turns after the last answer are not read. In an unpaired record with a
``completion``, the conversation is the prompt and is read to its end."""
_TWINS = (("role", "from"), ("content", "value"))
"""Pairs of keys of a message the second of which is read only if the message does not have the first one."""
_MESSAGE_KEYS = (
    *("role", "from", "content", "value", "tool_calls", "name", "tool_call_id"),
    *REASONING_KEYS,
)
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text can be trained on"),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), "samples have no weights"),
    **dict.fromkeys(("completions", "labels"), "no stage trains on the steps of an answer"),
    "margin": "only stage=rm reads the margin of a pair",
    "function_call": "calls are read from tool_calls",
    "functions": "definitions of functions are read from tools",
    "refusal": "answers are read from content",
    "train_detail": "an assistant turn is trained as a whole",
}
"""Fields that would change what is trained but are not read, each with the reason."""


def unread_fields(record: Mapping[str, object], options: RecordOptions, origin: str) -> list[str]:
    """Return the names of fields that have a value and are not read; ``FIELD[].KEY`` for keys of messages.

    Turns after the last answer, which are not read either, are named too.

    Raises:
        RecordError: if a field that would change what is trained is not named in ``data.ignore_fields``.
        ConfigError: if ``data.ignore_fields`` names a field that is read.
    """
    assert options.format != "auto"
    displaced = set(_displaced(record, options.format))
    read = (*_READ[options.format], *(("margin",) if options.ranked else ()))
    read = tuple(name for name in read if name not in displaced)
    for name in options.ignore_fields:
        if name in read and record.get(name) not in _EMPTY:
            raise ConfigError(
                f"data.ignore_fields: has {name!r}, a field of {origin} that format {options.format} reads.\n"
                "Take it out of the list, and out of the records to train without it."
            )
    names = [name for name, value in record.items() if name not in read and value not in _EMPTY]
    for name in (name for name in read if name not in _ALWAYS):  # a chat template gets these unchanged
        names += [f"{name}[].{key}" for key in dict.fromkeys(_unread_keys(record.get(name)))]
    answers_apart = options.format == "unpaired" and record.get("completion") is not None
    for name in () if answers_apart else _UP_TO_AN_ANSWER.get(options.format, ()):
        if name in read and ends_without_an_answer(record.get(name)):
            names.append(f"{name}[] after the last answer")
    if options.format == "segments":
        names = [name for name in names if name not in ("segments[].text", "segments[].label")]
    for name in names:
        own = name.rpartition(".")[2]
        reason = _REFUSED.get(own)
        if reason is not None and not {name, own} & {*options.ignore_fields}:
            raise RecordError(
                f"{origin}: has a field {name!r}, and {reason}. "
                f"Remove it, or set data.ignore_fields=[{own}] to train without it."
            )
    return names


def without_ignored_parts(
    record: Mapping[str, object], options: RecordOptions
) -> tuple[Mapping[str, object], list[str]]:
    """Return the record without the parts of contents whose type ``data.ignore_fields`` names.

    The list has the types that were left out, each as ``FIELD[].content[].TYPE``.
    """
    left_out: dict[str, None] = {}

    def is_kept(field: str, part: object) -> bool:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in options.ignore_fields:
            left_out[f"{field}[].content[].{kind}"] = None
        return kind not in options.ignore_fields

    def kept(field: str, message: object) -> object:
        if not isinstance(message, dict):
            return message
        parts = {key: value for key, value in message.items() if isinstance(value, list)}
        return message | {
            key: [part for part in value if is_kept(field, part)]
            for key, value in parts.items()
            if key in ("content", "value")
        }

    if not options.ignore_fields:
        return record, []
    whole = {
        name: [kept(name, item) for item in value] if isinstance(value, list) else kept(name, value)
        for name, value in record.items()
        if name not in _ALWAYS
    }
    return {**record, **whole}, list(left_out)


def without_placeholders(
    record: Mapping[str, object], unread: Iterable[str]
) -> tuple[Mapping[str, object], list[str]]:
    """Return the record without the placeholders (``<image>``) of the media among the ``unread`` fields.

    A space or newline after a placeholder is removed with it, unless that would join two words. The list has
    the placeholders that were found.
    """
    kinds = {name.rpartition(".")[2].removesuffix("s") for name in unread}
    marks = [f"<{kind}>" for kind in ("image", "video", "audio") if kind in kinds]
    if not marks:
        return record, []
    either, found = "|".join(marks), set[str]()
    pattern = re.compile(rf"(?:(?<=\s)|\A)(?:{either})\s?|{either}")

    def stripped(value: object) -> object:
        if isinstance(value, str):
            found.update(match.strip() for match in pattern.findall(value))
            return pattern.sub("", value)
        if isinstance(value, dict):
            return {key: item if key == "tool_calls" else stripped(item) for key, item in value.items()}
        return [stripped(item) for item in value] if isinstance(value, list) else value

    whole = {name: value if name in _ALWAYS[1:] else stripped(value) for name, value in record.items()}
    return whole, sorted(found)


def _displaced(record: Mapping[str, object], format: Format) -> Iterator[str]:
    """Yield the fields that are not read because others of the record are read in their place."""
    for name, other in _ALTERNATIVES.get(format, ()):
        if record.get(name) is not None:
            yield other
    has = {name for name, value in record.items() if value is not None}
    implicit = format == "preference" and not has & {*_PROMPTS}
    answers = ("chosen", "chosen_messages") if implicit else ()
    if any(
        begins_with_system(record.get(name)) for name in ("messages", "conversations", "prompt", *answers)
    ):
        yield "system"
    if format not in ("preference", "unpaired"):
        return
    last_turn = format == "unpaired" and "completion" not in has
    if last_turn and has & {"output", "response"}:
        # A record of alpaca, in which prompt is another name of instruction.
        yield from ("conversations", "messages", *(("prompt",) if "instruction" in has else ()))
        return
    yield from ("output", "response")
    prompts = ("messages", "conversations") if last_turn else _PROMPTS
    found = next((name for name in prompts if name in has), None)
    yield from (name for name in _PROMPTS if name != found)
    if found != "instruction":
        yield from ("input", "query", "history")


def _unread_keys(value: object) -> Iterator[str]:
    for message in value if isinstance(value, list) else [value]:
        if isinstance(message, dict):
            displaced = {other for name, other in _TWINS if message.get(name) is not None}
            read = {*_MESSAGE_KEYS, *training_flags(message)} - displaced
            for key, content in message.items():
                if key not in read and content not in _EMPTY:
                    yield str(key)
