"""Records in all common formats are recognised and normalised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from components.data.records.columns import check_columns
from components.data.records.formats import KINDS, detect, normalize
from components.data.records.options import Format, RecordError, RecordOptions
from components.data.records.record_files import Unreadable, read_records
from components.data.records.samples import (
    ChatSample,
    CompletionSample,
    Message,
    PreferenceSample,
    Sample,
    SegmentsSample,
    TextSample,
    UnpairedSample,
)

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
    "sharegpt-system-field-and-turn": (
        "sharegpt",
        {"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT], "system": "other"},
        ChatSample([S, U, A], None),
    ),
    "alpaca-without-an-instruction": (
        "alpaca",
        {"instruction": "", "input": "U", "output": "A"},
        ChatSample([U, A], None),
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
                {"from": "function_call", "value": '[{"name": "f"}, {"name": "g", "parameters": {"y": 2}}]'},
                {"from": "observation", "value": "1"},
                {"from": "tool", "value": "2"},
                GPT,
            ],
            "tools": [TOOL],
        },
        ChatSample(
            [
                U,
                message("assistant", "", tool_calls=[call("f", {}), call("g", {"y": 2})]),
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
    "two-questions-and-a-late-system-turn": (
        "messages",
        {"messages": [U, U2, S, A, A2]},
        ChatSample([U, U2, S, A, A2], None),
    ),
    "turns-after-the-last-answer": ("messages", {"messages": [U, A, U2]}, ChatSample([U, A], None)),
    "untrained-turns": (
        "messages",
        {
            "messages": [
                *(U, {**A, "weight": 0}, {**U2, "training": False}, {**A2, "loss_weight": 1.0}),
                *({**U, "loss": None}, {**A, "loss": False}, U2, {**A2, "loss": True}),
            ]
        },
        ChatSample([U, A, U2, A2] * 2, None, frozenset({1, 5})),
    ),
    "parts-of-llamafactory": (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "U"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "hm"},
                        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    ],
                },
                message("tool", "2"),
                A,
            ]
        },
        ChatSample(
            [
                U,
                message("assistant", "", reasoning_content="hm", tool_calls=[call("f", {"x": 1})]),
                message("tool", "2"),
                A,
            ],
            None,
        ),
    ),
    "prompt-and-response": ("alpaca", {"prompt": "U", "response": "A"}, ChatSample([U, A], None)),
    "prompt-completion-messages": (
        "prompt_completion",
        {"prompt": [U, A, U2], "completion": [A2]},
        ChatSample([U, A, U2, A2], None, frozenset({1})),
    ),
    "prompt-completion-strings": (
        "prompt_completion",
        {"prompt": "U", "completion": "A"},
        ChatSample([U, A], None),
    ),
    "template-kwargs": (
        "messages",
        {"messages": [U, A], "chat_template_kwargs": {"enable_thinking": False}},
        ChatSample([U, A], None, template_kwargs={"enable_thinking": False}),
    ),
    "segments": (
        "segments",
        {"segments": [{"text": "a", "label": False}, {"text": "b", "label": True}]},
        SegmentsSample((("a", False), ("b", True))),
    ),
    "pair-messages-of-llamafactory": (
        "preference",
        {
            "chosen_messages": [{**U, "loss_weight": 0.0}, {**A, "loss_weight": 1.0}],
            "rejected_messages": [{**U, "loss_weight": 0.0}, {**A2, "loss_weight": 1.0}],
        },
        PAIR,
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
    assert detect(record, KINDS[format], "f:1") == format
    assert normalize(record, RecordOptions(format=format, strings="chat"), "f:1")[0] == sample
    assert json.dumps(record) == before


PLAIN: dict[str, tuple[Format, dict[str, Any], Sample]] = {
    "completion": ("prompt_completion", {"prompt": "U", "completion": " A"}, CompletionSample("U", " A")),
    "pair": (
        "preference",
        {"prompt": "U", "chosen": " A", "rejected": " B"},
        PreferenceSample("U", " A", " B", None),
    ),
    "pair-implicit-prompt": (
        "preference",
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        PreferenceSample("The sky is", " blue.", " green.", None),
    ),
    "unpaired": (
        "unpaired",
        {"prompt": "U", "completion": " A", "label": False},
        UnpairedSample("U", " A", False, None, " A"),
    ),
    "pair-with-messages": (  # a string next to messages is a turn
        "preference",
        {"prompt": "U", "chosen": [U, A], "rejected": [U, A2]},
        PAIR,
    ),
    "alpaca": ("alpaca", {"instruction": "U", "output": "A"}, ChatSample([U, A], None)),
}


@pytest.mark.parametrize(("format", "record", "sample"), PLAIN.values(), ids=PLAIN)
def test_strings_are_plain_unless_a_chat_is_wanted(
    format: Format, record: dict[str, Any], sample: Sample
) -> None:
    assert normalize(record, RecordOptions(format=format), "f:1")[0] == sample


def test_options_of_conversations() -> None:
    options = RecordOptions(format="messages", default_system="S", mask_history=True)
    sample, _ = normalize({"messages": [U, A, U2, A2]}, options, "f:1")
    assert sample == ChatSample([S, U, A, U2, A2], None, frozenset({2}))
    with pytest.raises(RecordError, match=r"message 0 \(assistant\) is the first"):
        normalize({"messages": [A]}, options, "f:1")
    own = {"messages": [message("system", "own"), U, A]}
    assert normalize(own, options, "f:1")[0] == ChatSample(own["messages"], None)
    pair = {"prompt": [U], "chosen": [A], "rejected": [A2]}
    found, _ = normalize(pair, replace(options, format="preference"), "f:1")
    assert found == PreferenceSample([S, U], [A], [A2], None)
    kwargs = RecordOptions(format="messages", chat_template_kwargs={"a": 1, "b": 2})
    found, _ = normalize({"messages": [U, A], "chat_template_kwargs": {"b": 3}}, kwargs, "f:1")
    assert found == ChatSample([U, A], None, template_kwargs={"a": 1, "b": 3})


def test_a_flag_of_another_name_excludes_a_turn() -> None:
    options = RecordOptions(format="messages", columns={"train": "training"})
    record = {"messages": [U, {**A, "training": False}, U2, {**A2, "training": True}]}
    assert normalize(record, options, "f:1") == (ChatSample([U, A, U2, A2], None, frozenset({1})), [])


def test_parts_that_are_ignored_are_named() -> None:
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    record = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "U"}]}, A]}
    with pytest.raises(RecordError, match=r"of type 'image_url', .* data\.ignore_fields=\[image_url\]"):
        normalize(record, RecordOptions(format="messages"), "f:1")
    options = RecordOptions(format="messages", ignore_fields=("image_url",))
    assert normalize(record, options, "f:1") == (
        ChatSample([U, A], None),
        ["messages[].content[].image_url"],
    )


def test_names_of_columns_and_roles() -> None:
    options = RecordOptions(
        format="messages",
        columns={"messages": "dialog", "system": "setting", "role": "who", "content": "said"},
        roles={"customer": "user", "agent": "assistant"},
    )
    record = {
        "dialog": [{"who": "customer", "said": "U"}, {"who": "agent", "said": "A"}],
        "setting": "S",
        "id": 7,
    }
    assert normalize(record, options, "f:1") == (ChatSample([S, U, A], None), ["id"])
    check_columns([({"dialog": []}, "f:1"), (record, "f:2")], options)
    with pytest.raises(
        RecordError, match=r"f:1: data\.columns\.system: no record from here to f:2 has a field 'setting'"
    ):
        check_columns([({"dialog": []}, "f:1"), ({"dialog": []}, "f:2")], options)
    question = RecordOptions(format="alpaca", columns={"prompt": "question", "response": "answer"})
    assert normalize({"question": "U", "answer": "A"}, question, "f:1")[0] == ChatSample([U, A], None)


def test_a_key_of_messages_that_none_has(caplog: pytest.LogCaptureFixture) -> None:
    standard, plain = {"messages": [U, A]}, {"prompt": "U", "completion": "A", "about": {"id": 3}}
    options = RecordOptions(format="messages", columns={"role": "rloe", "content": "text"})
    check_columns([(standard, "f:1"), (plain, "f:2")], options)
    assert normalize(standard, options, "f:1") == (ChatSample([U, A], None), [])
    with pytest.raises(RecordError, match=r"has the role None\. .* name its key in data\.columns\.role"):
        normalize({"messages": [{"who": "user", "text": "U"}]}, options, "f:1")
    own = [({"text": "x"}, "f:1"), ({"messages": [{**U, "trained": False}]}, "f:2")]
    check_columns(own, RecordOptions(columns={"train": "trained"}))
    check_columns(own[:1], RecordOptions(columns={"train": "trained"}))
    assert not caplog.messages
    check_columns(own, RecordOptions(columns={"train": "trian"}))
    [warning] = caplog.messages
    assert warning.startswith("f:1: data.columns.train: no record from here to f:2 has a message with a key")
    assert warning.endswith("The keys found are role, content, trained.")


def test_names_of_messages_do_not_rename_the_keys_of_tools() -> None:
    options = RecordOptions(format="messages", columns={"role": "name", "content": "value", "tools": "api"})
    tool = {"type": "function", "function": {}, "value": "the time", "name": "now"}
    turns = [{"name": "user", "value": "U"}, {"name": "assistant", "value": "A"}]
    record = {"messages": turns, "api": [tool], "chat_template_kwargs": {"name": "n"}}
    sample = ChatSample([U, A], [tool], template_kwargs={"name": "n"})
    assert normalize(record, options, "f:1") == (sample, [])


def test_what_is_not_read_is_named() -> None:
    record = {"messages": [{**U, "id": 3}, A], "source": "web", "images": [], "note": None}
    assert normalize(record, RecordOptions(format="messages"), "f:1")[1] == ["source", "messages[].id"]
    rendered = {"messages": [U, A], "tools": [{"type": "function", "function": {}, "labels": ["a"]}]}
    assert normalize(rendered, RecordOptions(format="messages"), "f:1")[1] == []
    images = {"conversations": [HUMAN, GPT], "images": ["a.jpg"]}
    ignoring = RecordOptions(format="sharegpt", ignore_fields=("images",))
    assert normalize(images, ignoring, "f:1") == (ChatSample([U, A], None), ["images"])
    in_turn = {"conversations": [{**HUMAN, "images": ["a.jpg"]}, GPT]}
    assert normalize(in_turn, ignoring, "f:1") == (ChatSample([U, A], None), ["conversations[].images"])


def test_a_renamed_role_has_been_read() -> None:
    record = {"conversations": [{"from": "customer", "value": "U"}, {"from": "agent", "value": "A"}]}
    options = RecordOptions(format="sharegpt", roles={"customer": "user", "agent": "assistant"})
    assert normalize(record, options, "f:1")[1] == []


@pytest.mark.parametrize(("text", "desirable"), [("true", True), ("False", False), ("1", True), ("0", False)])
def test_labels_and_margins_of_a_csv_file_are_text(text: str, desirable: bool) -> None:
    record = {"prompt": "U", "completion": "A", "label": text}
    sample, _ = normalize(record, RecordOptions(format="unpaired"), "f:1")
    assert isinstance(sample, UnpairedSample)
    assert sample.desirable is desirable
    pair = {"prompt": "U", "chosen": "A", "rejected": "B", "margin": "1.5"}
    ranked, _ = normalize(pair, RecordOptions(format="preference", ranked=True), "f:1")
    assert isinstance(ranked, PreferenceSample)
    assert ranked.margin == 1.5
    with pytest.raises(RecordError, match="field 'margin' is 1000"):
        normalize({**pair, "margin": 10**400}, RecordOptions(format="preference", ranked=True), "f:1")


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
        assert not isinstance(record, Unreadable)
        assert detect(record, KINDS[format], origin) == format
        sample, unread = normalize(record, RecordOptions(format=format), origin)
        assert not unread
        if isinstance(sample, ChatSample):
            turns += len(sample.messages)
        if isinstance(sample, PreferenceSample):
            systems += sample.prompt[0]["role"] == "system"
    assert turns == (num_turns or 0)
    assert systems == (80 if format == "preference" else 0)
