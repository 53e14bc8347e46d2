"""Convert records of all formats to samples. Every error message names the record's origin."""

from collections.abc import Mapping

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.data.records.columns import renamed, unnamed
from components.data.records.messages import (
    alpaca_answer,
    alpaca_prompt,
    checked,
    fail,
    read_string,
    read_template_kwargs,
    read_tools,
    read_turns,
    split_untrained,
    with_default_system,
)
from components.data.records.options import Format, RecordOptions
from components.data.records.preference_records import read_completion, read_preference, read_unpaired
from components.data.records.record_files import PairAnswer, Record
from components.data.records.samples import (
    ChatSample,
    CompletionSample,
    Message,
    PreferenceSample,
    Sample,
    SegmentsSample,
    TextSample,
)
from components.data.records.unread_fields import (
    unread_fields,
    without_ignored_parts,
    without_placeholders,
)

KINDS: Mapping[Format, SampleKind] = {
    "text": "text",
    "prompt_completion": "chat",
    "segments": "chat",
    "alpaca": "chat",
    "sharegpt": "chat",
    "messages": "chat",
    "preference": "preference",
    "unpaired": "unpaired",
}
"""The kind of sample that each format holds."""

_MARKS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("preference", ("chosen", "rejected")),
    ("preference", ("chosen_messages", "rejected_messages")),
    ("unpaired", ("completion", "label")),
    ("unpaired", ("kto_tag",)),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("alpaca", ("prompt", "response")),
    ("segments", ("segments",)),
    ("text", ("text",)),
)
"""The keys that identify a format. The first format whose keys are all present is chosen."""
_LABELLED: tuple[tuple[Format, tuple[str, ...]], ...] = tuple(
    ("unpaired", (key, "label")) for key in ("messages", "conversations", "output", "response")
)
"""Further keys that identify unpaired data. They are used only if the stage trains on such data, because a
``label`` in other data may have another meaning."""


_UNTRAINABLE = {
    "completions": "no stage trains on the steps of an answer; give one answer in 'completion'",
    "input_ids": "data is tokenised here; give the text, or Megatron's .bin and .idx files",
}
"""Fields of formats that are not supported, each with the reason and the remedy."""


def detect(record: Mapping[str, object], kind: SampleKind, origin: str) -> Format:
    """Return the format that the fields of ``record`` identify; ``kind`` is what the stage trains on.

    Raises:
        ConfigError: if the fields match no known format, or one that no stage trains on.
    """
    marks = (*_LABELLED, *_MARKS) if kind == "unpaired" else _MARKS
    for name, keys in marks:
        if all(record.get(key) is not None for key in keys):
            lost = [key for key in ("label", "kto_tag") if key in record and record[key] is None]
            # A label that is null is a fault of this record, which does not change the format of all.
            return "unpaired" if lost and kind == "unpaired" and KINDS[name] == "chat" else name
    for field, reason in _UNTRAINABLE.items():
        if record.get(field) is not None:
            raise ConfigError(f"{origin}: has a field {field!r}, and {reason}.")
    if record.get("prompt") is not None:
        raise ConfigError(
            f"{origin}: is a prompt without an answer, which no stage trains on.\n"
            "Add a field 'completion', or name the field of the answer in data.columns.completion."
        )
    seen = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in record.items())
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _MARKS)
    raise ConfigError(
        f"{origin}: data.format=auto does not recognise a record with fields {seen}.\n"
        f"Name the fields in data.columns, or rename them, to one of ({known})."
    )


def normalize(given: Record | PairAnswer, options: RecordOptions, origin: str) -> tuple[Sample, list[str]]:
    """Return the sample that a record describes, and the names of the fields that are not read.

    Raises:
        RecordError: if a field is missing or a type is wrong, or if a field that is not read would change
            what is trained.
    """
    if isinstance(given, PairAnswer):
        pair, unread = normalize(given.record, options, origin)
        assert isinstance(pair, PreferenceSample)
        return pair.unpaired(given.chosen), unread
    record, parts = without_ignored_parts(renamed(given, options), options)
    unread = unread_fields(record, options, origin)
    record, placeholders = without_placeholders(record, unread)
    return _sample(record, options, origin), unnamed(given, options) + unread + parts + placeholders


def _sample(record: Mapping[str, object], options: RecordOptions, origin: str) -> Sample:
    format = options.format
    assert format != "auto"
    if format == "text":
        return TextSample(read_string(record, "text", origin))
    if format == "segments":
        return _read_segments(record, origin)
    if format == "preference":
        return read_preference(record, options, origin)
    if format == "unpaired":
        return read_unpaired(record, options, origin)
    if format == "prompt_completion":
        return _read_prompt_completion(record, options, origin)
    if format == "alpaca":
        turns = [*alpaca_prompt(record, origin), alpaca_answer(record, origin)]
    else:
        turns = read_turns(record, "messages" if format == "messages" else "conversations", origin)
    return _chat(turns, record, options, origin)


def _read_segments(record: Mapping[str, object], origin: str) -> SegmentsSample:
    segments = record.get("segments")
    remedy = 'Write [{"text": ..., "label": true or false}, ...].'
    if not isinstance(segments, list) or not segments:
        fail(origin, "field 'segments' is not a list of texts", remedy)
    for segment in segments:
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            fail(origin, "field 'segments' holds something without a text", remedy)
        if not isinstance(segment.get("label"), bool):
            fail(origin, "a segment has no label", remedy)
    return SegmentsSample(tuple((segment["text"], segment["label"]) for segment in segments))


def _read_prompt_completion(
    record: Mapping[str, object], options: RecordOptions, origin: str
) -> CompletionSample | ChatSample:
    """Read a prompt and its completion.

    Turns of the prompt are not trained on, unless ``data.train_on_prompt`` is set.
    """
    prompt, completion = read_completion(record, options, origin)
    if isinstance(prompt, str):
        assert isinstance(completion, str)
        return CompletionSample(prompt, completion)
    assert isinstance(completion, list)
    return _chat([*prompt, *completion], record, options, origin, prompt_turns=len(prompt))


def _chat(
    turns: list[Message],
    record: Mapping[str, object],
    options: RecordOptions,
    origin: str,
    prompt_turns: int = 0,
) -> ChatSample:
    own = checked(turns, origin)
    whole = with_default_system(own, options)
    first = prompt_turns + len(whole) - len(own)
    messages, excluded = split_untrained(whole)
    if options.train_on_prompt and any(messages[i]["role"] == "assistant" for i in excluded):
        fail(
            origin,
            "excludes a turn from training, and data.train_on_prompt trains on every turn",
            "Remove the flag of the turn, or set data.train_on_prompt=false.",
        )
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    excluded |= set(range(first))
    if options.mask_history:
        excluded |= set(answers[:-1])
    tools, kwargs = read_tools(record, origin), read_template_kwargs(record, options, origin)
    return ChatSample(messages, tools, excluded & set(answers), kwargs)
