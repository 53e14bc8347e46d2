"""Errors about invalid records name the origin, the fault and the remedy in one or two lines."""

from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.data.records.formats import Format, detect, normalize
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
    "alpaca-empty-output": ("alpaca", {"instruction": "U", "output": ""}, "field 'output' is empty"),
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
        "message 1 (assistant) is of type NoneType",
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
    "image": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]},
        "messages[0] has a part that is not text",
    ),
    "empty-answer": (
        "messages",
        {"messages": [U, message("assistant", "")]},
        "message 1 (assistant) is empty",
    ),
    "empty-question": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": " "}, GPT]},
        "message 0 (user) is empty",
    ),
    "answer-first": ("sharegpt", {"conversations": [GPT, HUMAN, GPT]}, "message 0 (assistant) follows start"),
    "two-questions": ("messages", {"messages": [U, U2, A]}, "message 1 (user) follows user"),
    "late-system": ("messages", {"messages": [U, S, A]}, "message 1 (system) follows user"),
    "two-systems": (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "x"}, HUMAN, GPT], "system": "S"},
        "message 1 (system) follows system",
    ),
    "stray-observation": (
        "sharegpt",
        {"conversations": [HUMAN, {"from": "observation", "value": "x"}, GPT]},
        "message 1 (tool) follows user",
    ),
    "ends-with-user": ("messages", {"messages": [U, A, U2]}, "ends with a user turn"),
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
    "pair-empty": ("preference", {"prompt": "U", "chosen": "A", "rejected": ""}, "field 'rejected' is empty"),
    "pair-empty-list": ("preference", {"prompt": "U", "chosen": [], "rejected": "A"}, "'chosen' is empty"),
    "pair-same-no-prompt": ("preference", {"chosen": "A", "rejected": "A"}, "do not differ"),
    "unpaired-no-label": ("unpaired", {"prompt": "U", "completion": "A"}, "field 'label' is missing"),
    "unpaired-no-tag": ("unpaired", {"messages": [U, A], "kto_tag": None}, "field 'kto_tag' is missing"),
    "unpaired-odd-label": (
        "unpaired",
        {"prompt": "U", "completion": "A", "label": "yes"},
        "field 'label' is 'yes'. Write true for a completion to follow",
    ),
    "unpaired-empty": (
        "unpaired",
        {"prompt": "U", "completion": " ", "label": True},
        "field 'completion' is empty",
    ),
    "unpaired-no-prompt": ("unpaired", {"completion": "A", "label": True}, "has no prompt"),
    "unpaired-no-completion": ("unpaired", {"prompt": "U", "label": True}, "'completion' is missing"),
    "unpaired-no-answer": ("unpaired", {"messages": [U, A, U2], "label": 1}, "ends with a user turn"),
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
    "pair-prompt-answered": (
        "preference",
        {"prompt": [U, A], "chosen": [A2], "rejected": [A]},
        "follows assistant",
    ),
}


@pytest.mark.parametrize(("format", "record", "message"), BAD.values(), ids=BAD)
def test_bad_record_is_named(format: Format, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize(record, format, "data.jsonl:12")
    assert str(caught.value).startswith("data.jsonl:12: ")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "record", [{"question": "Q", "answer": "A"}, {}, {"chosen": "A", "instruction": "U"}]
)
def test_unknown_format_lists_the_known_ones(record: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(record, "data.jsonl:1")
    text = str(caught.value)
    assert text.startswith("data.jsonl:1: data.format=auto")
    assert all(field in text for field in record)
    assert all(name in text for name in ("text", "alpaca", "sharegpt", "messages", "preference"))
    assert len(text.splitlines()) == 2
