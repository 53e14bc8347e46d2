"""Records in all common formats are recognised and normalised."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.data.records.formats import Format, detect, normalize
from components.data.records.record_files import read_records
from components.data.records.samples import ChatSample, Message, PreferenceSample, Sample, TextSample

SHARED = Path(__file__).resolve().parents[6] / "shared" / "data"


def message(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": name, "arguments": arguments}}


S, U, A = message("system", "S"), message("user", "U"), message("assistant", "A")
U2, A2 = message("user", "U2"), message("assistant", "A2")
HUMAN, GPT = {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}
BARE_TOOL = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": BARE_TOOL}
PAIR = PreferenceSample([U], [A], [A2], None)

CASES: dict[str, tuple[Format, dict[str, Any], Sample]] = {
    "text": ("text", {"text": "T", "url": "x"}, TextSample("T")),
    "alpaca": ("alpaca", {"instruction": "U", "output": "A"}, ChatSample([U, A], None)),
    "alpaca-empty-fields": (
        "alpaca",
        {"instruction": "U", "input": "", "output": "A", "system": "", "history": []},
        ChatSample([U, A], None),
    ),
    "alpaca-everything": (
        "alpaca",
        {"instruction": "I", "input": "N", "output": "A", "system": "S", "history": [["U2", "A2"]]},
        ChatSample([S, U2, A2, message("user", "I\nN"), A], None),
    ),
    "sharegpt": ("sharegpt", {"conversations": [HUMAN, GPT]}, ChatSample([U, A], None)),
    "sharegpt-system": (
        "sharegpt",
        {"conversations": [HUMAN, GPT], "system": "S"},
        ChatSample([S, U, A], None),
    ),
    "sharegpt-system-turn": (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT]},
        ChatSample([S, U, A], None),
    ),
    "sharegpt-tools": (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "2"},
                GPT,
            ],
            "tools": json.dumps([BARE_TOOL]),
        },
        ChatSample(
            [U, message("assistant", "", tool_calls=[call("f", {"x": 1})]), message("tool", "2"), A], [TOOL]
        ),
    ),
    "sharegpt-two-calls": (
        "sharegpt",
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": '[{"name": "f"}, {"name": "g", "arguments": "{}"}]'},
                {"from": "observation", "value": "1"},
                {"from": "tool", "value": "2"},
                GPT,
            ],
            "tools": [TOOL],
        },
        ChatSample(
            [
                U,
                message("assistant", "", tool_calls=[call("f", {}), call("g", {})]),
                message("tool", "1"),
                message("tool", "2"),
                A,
            ],
            [TOOL],
        ),
    ),
    "messages": ("messages", {"messages": [S, U, A, U2, A2]}, ChatSample([S, U, A, U2, A2], None)),
    "messages-parts": (
        "messages",
        {"messages": [{**U, "content": [{"type": "text", "text": "U"}]}, A]},
        ChatSample([U, A], None),
    ),
    "messages-developer": (
        "messages",
        {"messages": [message("developer", "S"), U, A]},
        ChatSample([S, U, A], None),
    ),
    "messages-of-a-table": (  # the missing columns of a record are None
        "messages",
        {
            "messages": [{**U, "tool_calls": None, "from": None}, {**A, "value": None}],
            "tools": None,
            "chosen": None,
        },
        ChatSample([U, A], None),
    ),
    "messages-tools": (
        "messages",
        {
            "messages": [
                U,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {**A, "reasoning_content": "hm"},
            ],
            "tools": [TOOL],
        },
        ChatSample(
            [
                U,
                message("assistant", "", tool_calls=[call("f", {"x": 1}, id="c1")]),
                message("tool", "2", tool_call_id="c1"),
                {**A, "reasoning_content": "hm"},
            ],
            [TOOL],
        ),
    ),
    "pair-sharegpt": (
        "preference",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "A2"}},
        PAIR,
    ),
    "pair-sharegpt-system-and-turns": (
        "preference",
        {
            "conversations": [HUMAN, GPT, {"from": "human", "value": "U2"}],
            "system": "S",
            "chosen": GPT,
            "rejected": {"from": "gpt", "value": "A2"},
            "tools": [BARE_TOOL],
        },
        PreferenceSample([S, U, A, U2], [A], [A2], [TOOL]),
    ),
    "pair-openai": ("preference", {"messages": [U], "chosen": A, "rejected": A2}, PAIR),
    "pair-strings": ("preference", {"prompt": "U", "chosen": "A", "rejected": "A2"}, PAIR),
    "pair-strings-system": (
        "preference",
        {"prompt": "U", "chosen": "A", "rejected": "A2", "system": "S"},
        PreferenceSample([S, U], [A], [A2], None),
    ),
    "pair-lists": (
        "preference",
        {"prompt": [S, U], "chosen": [A], "rejected": [A2]},
        PreferenceSample([S, U], [A], [A2], None),
    ),
    "pair-implicit-prompt": (
        "preference",
        {"chosen": [S, U, A, U2, A], "rejected": [S, U, A, U2, A2]},
        PreferenceSample([S, U, A, U2], [A], [A2], None),
    ),
    "pair-prompt-repeated": ("preference", {"prompt": "U", "chosen": [U, A], "rejected": [U, A2]}, PAIR),
    "pair-prompt-is-the-last-question": (
        "preference",
        {"prompt": "U2", "chosen": [U, A, U2, A], "rejected": [U, A, U2, A2]},
        PreferenceSample([U, A, U2], [A], [A2], None),
    ),
    "pair-prompt-has-the-system-turn": (
        "preference",
        {"prompt": "U", "system": "S", "chosen": [U, A], "rejected": [U, A2]},
        PreferenceSample([S, U], [A], [A2], None),
    ),
    "pair-alpaca": (
        "preference",
        {"instruction": "I", "input": "N", "chosen": "A", "rejected": "A2"},
        PreferenceSample([message("user", "I\nN")], [A], [A2], None),
    ),
}


@pytest.mark.parametrize(("format", "record", "sample"), CASES.values(), ids=CASES)
def test_record_is_recognised_and_normalised(format: Format, record: dict[str, Any], sample: Sample) -> None:
    before = json.dumps(record)
    assert detect(record, "f:1") == format
    assert normalize(record, format, "f:1") == sample
    assert json.dumps(record) == before


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real files under {SHARED}")
@pytest.mark.parametrize(
    ("name", "format", "num_turns"),
    [
        ("alpaca_en_demo.json", "alpaca", 2 * 999),
        ("dpo_en_demo.json", "preference", None),
        ("c4_demo.jsonl", "text", None),
        ("wiki_demo.txt", "text", None),
    ],
)
def test_real_file(name: str, format: Format, num_turns: int | None) -> None:
    turns = systems = 0
    for record, origin in read_records(str(SHARED / name)):
        assert detect(record, origin) == format
        sample = normalize(record, format, origin)
        if isinstance(sample, ChatSample):
            turns += len(sample.messages)
        if isinstance(sample, PreferenceSample):
            systems += sample.prompt[0]["role"] == "system"
    assert turns == (num_turns or 0)
    assert systems == (80 if format == "preference" else 0)
