"""Errors about invalid records name the origin, the fault and the remedy in one or two lines."""

from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.data.records.formats import detect, normalize
from components.data.records.options import Format, RecordError, RecordOptions
from components.data.records.samples import Message


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


S, U, A = message("system", "S"), message("user", "U"), message("assistant", "A")
U2, A2 = message("user", "U2"), message("assistant", "A2")
HUMAN, GPT = {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}

BAD: dict[str, tuple[Format, dict[str, Any], str]] = {
    "text-missing": ("text", {"txt": "x"}, "field 'text' is missing. Fields seen: txt."),
    "text-empty": ("text", {"text": " \n"}, "field 'text' is empty"),
    "text-number": ("text", {"text": 3}, "field 'text' is of type int"),
    "alpaca-no-output": ("alpaca", {"instruction": "U"}, "field 'output' is missing"),
    "alpaca-input-list": (
        "alpaca",
        {"instruction": "U", "input": [], "output": "A"},
        "field 'input' is of type list",
    ),
    "alpaca-history": (
        "alpaca",
        {"instruction": "U", "output": "A", "history": [["q"]]},
        "not a list of [question, answer]",
    ),
    "alpaca-history-null": (
        "alpaca",
        {"instruction": "U", "output": "A", "history": [["q", None]]},
        "field 'history' is not a list of [question, answer]",
    ),
    "alpaca-history-number": (
        "alpaca",
        {"instruction": "U", "output": "A", "history": 3},
        "field 'history' is not",
    ),
    "no-turns": ("messages", {"messages": []}, "field 'messages' is empty"),
    "turns-missing": ("messages", {"text": "x"}, "field 'messages' is missing"),
    "turns-string": ("sharegpt", {"conversations": "Hi"}, "field 'conversations' is not a list of messages"),
    "turn-string": ("sharegpt", {"conversations": ["Hi"]}, "conversations[0] is of type str"),
    "unknown-role": (
        "messages",
        {"messages": [U, {"role": "bot", "content": "A"}]},
        "messages[1] has the role 'bot'",
    ),
    "no-role": ("messages", {"messages": [{"content": "A"}]}, "messages[0] has the role None"),
    "content-number": (
        "messages",
        {"messages": [{"role": "user", "content": 3}, A]},
        "content of messages[0] is of type int",
    ),
    "content-misnamed": (
        "messages",
        {"messages": [{"role": "user", "text": "U"}, A]},
        "messages[0], a user turn, has no content. Fill it in",
    ),
    "part-of-no-type": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "U"}]}, A]},
        "messages[0] has a part that is not text",
    ),
    "image": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]},
        "messages[0] has a part of type 'image_url', and only text can be trained on",
    ),
    "answer-first": ("sharegpt", {"conversations": [GPT, HUMAN, GPT]}, "message 0 (assistant) is the first"),
    "stray-observation": (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "observation", "value": "x"}, GPT]},
        "message 1 (tool) follows user",
    ),
    "function-call-no-json": (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "function_call", "value": "f()"}]},
        "is not valid JSON",
    ),
    "function-call-no-name": (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "function_call", "value": "[3]"}]},
        "calls no named function",
    ),
    "tools-no-json": ("sharegpt", {"conversations": [HUMAN, GPT], "tools": "f"}, "'tools' is not valid JSON"),
    "tools-string": ("messages", {"messages": [U, A], "tools": ["f"]}, "'tools' is not a list of function"),
    "pair-no-rejected": ("preference", {"prompt": "U", "chosen": "A"}, "field 'rejected' is missing"),
    "pair-empty-list": ("preference", {"prompt": "U", "chosen": [], "rejected": "A"}, "'chosen' is empty"),
    "pair-same-no-prompt": ("preference", {"chosen": "A", "rejected": "A"}, "do not differ"),
    "unpaired-no-label": ("unpaired", {"prompt": "U", "completion": "A"}, "field 'label' is missing"),
    "unpaired-no-tag": ("unpaired", {"messages": [U, A], "kto_tag": None}, "field 'kto_tag' is null"),
    "unpaired-odd-label": (
        "unpaired",
        {"prompt": "U", "completion": "A", "label": "yes"},
        "field 'label' is 'yes'. Write true for a completion to follow",
    ),
    "unpaired-no-prompt": ("unpaired", {"completion": "A", "label": True}, "has no prompt"),
    "unpaired-no-completion": ("unpaired", {"prompt": "U", "label": True}, "'completion' is missing"),
    "pair-no-prompt": ("preference", {"chosen": "A", "rejected": "A2"}, "share no leading message"),
    "pair-one-inside-the-other": (
        "preference",
        {"chosen": [U, A], "rejected": [U, A, U2, A2]},
        "do not differ",
    ),
    "pair-other-question": (
        "preference",
        {"chosen": [U, A, U2, A], "rejected": [U, A, message("user", "V"), A2]},
        "an answer begins with a user turn",
    ),
    "pair-other-prompt": (
        "preference",
        {"prompt": "V", "chosen": [U, A], "rejected": [U, A2]},
        "'prompt' is not the",
    ),
    "only-questions": ("messages", {"messages": [S, U, U2]}, "the conversation has no assistant turn"),
    "weight-half": (
        "messages",
        {"messages": [U, {**A, "weight": 0.5}]},
        "weight of messages[1] is 0.5. Use 0 or 1",
    ),
    "trained-question": (
        "messages",
        {"messages": [{**U, "train": True}, A]},
        "train of messages[0] is True, a user turn",
    ),
    "trained-part": (
        "messages",
        {"messages": [U, {**A, "content": [{"type": "text", "text": "A", "train": False}]}]},
        "messages[1] marks a part of its content. Set",
    ),
    "untrained-answer-of-a-pair": (
        "preference",
        {"prompt": [U], "chosen": [{**A, "weight": 0}], "rejected": [A2]},
        "excluded from training",
    ),
    "answer-ends-with-a-question": (
        "preference",
        {"prompt": [U], "chosen": [A, U2], "rejected": [A2]},
        "an answer ends with a user turn",
    ),
    "images": (
        "sharegpt",
        {"conversations": [HUMAN, GPT], "images": ["a.jpg"]},
        "'images', and only text can be trained on. Remove it, or set data.ignore_fields=[images]",
    ),
    "image-of-a-turn": (
        "messages",
        {"messages": [{**U, "images": ["a.jpg"]}, A]},
        "has a field 'messages[].images'",
    ),
    "sample-weight": ("text", {"text": "T", "weight": 2}, "samples have no weights"),
    "margin": (
        "preference",
        {"prompt": "U", "chosen": "A", "rejected": "A2", "margin": 0.5},
        "only stage=rm reads the margin",
    ),
    "offsets": (
        "messages",
        {"messages": [U, {**A, "train_detail": [{"begin_offset": 0}]}]},
        "an assistant turn is trained as a whole",
    ),
    "arguments-misnamed": (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "function_call", "value": '{"name": "f", "args": {"x": 1}}'}]},
        "a call in conversations[1] has a field 'args' and no 'arguments'",
    ),
    "arguments-list": (
        "messages",
        {"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "the arguments of a call in messages[1] are not an object",
    ),
    "segments-strings": ("segments", {"segments": ["a"]}, "holds something without a text. Write"),
    "segments-no-label": ("segments", {"segments": [{"text": "a"}]}, "a segment has no label"),
    "kwargs-reserved": (
        "messages",
        {"messages": [U, A], "chat_template_kwargs": {"tokenize": True}},
        "'chat_template_kwargs' is not an object of variables",
    ),
}


@pytest.mark.parametrize(("format", "record", "message"), BAD.values(), ids=BAD)
def test_bad_record_is_named(format: Format, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        normalize(record, RecordOptions(format=format, strings="chat"), "data.jsonl:12")
    assert str(caught.value).startswith("data.jsonl:12: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


PLAIN: dict[str, tuple[Format, dict[str, Any], str]] = {
    "system": (
        "preference",
        {"prompt": "U", "chosen": "A", "rejected": "A2", "system": "S"},
        "strings, which take no system prompt. Set data.strings=chat",
    ),
    "tools": (
        "prompt_completion",
        {"prompt": "U", "completion": "A", "tools": [{"name": "f"}]},
        "take no tools. Set data.strings=chat",
    ),
    "no-prompt": ("prompt_completion", {"completion": "A"}, "has no prompt. Add"),
    "nothing-shared": ("preference", {"chosen": "A", "rejected": "B"}, "share no prompt. Add"),
    "one-inside-the-other": (
        "preference",
        {"chosen": "A b", "rejected": "A b c"},
        "do not differ in an answer",
    ),
}


@pytest.mark.parametrize(("format", "record", "message"), PLAIN.values(), ids=PLAIN)
def test_strings_that_cannot_be_plain(format: Format, record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        normalize(record, RecordOptions(format=format), "data.jsonl:12")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"prompt": "Q", "completions": ["A"], "labels": [True]},
            "no stage trains on the steps of an answer",
        ),
        ({"input_ids": [1], "labels": [1]}, "data is tokenised here"),
    ],
)
def test_formats_of_other_tools_that_are_not_trained_on(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.jsonl:1: has a field .*{reason}"):
        detect(record, "chat", "data.jsonl:1")


def test_a_field_that_is_null_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fields instruction \(null\), output\."):
        detect({"instruction": None, "output": "A"}, "chat", "data.jsonl:1")
    record = {"prompt": "U", "completion": "A", "label": None}
    assert detect(record, "unpaired", "data.jsonl:1") == "unpaired"
    assert detect(record, "chat", "data.jsonl:1") == "prompt_completion"


@pytest.mark.parametrize(
    "record", [{"question": "Q", "answer": "A"}, {}, {"chosen": "A", "instruction": "U"}]
)
def test_unknown_format_lists_the_known_ones(record: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(record, "chat", "data.jsonl:1")
    text = str(caught.value)
    assert text.startswith("data.jsonl:1: data.format=auto")
    assert all(field in text for field in record)
    assert all(name in text for name in ("text", "alpaca", "sharegpt", "messages", "preference"))
    assert len(text.splitlines()) == 2
