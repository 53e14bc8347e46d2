"""What a record holds and a sample does not is named, and what contradicts the options is refused."""

from typing import Any

import pytest

from components.contracts.errors import ConfigError
from components.data import FilesData
from components.data.records.formats import normalize
from components.data.records.options import Format, RecordError, RecordOptions
from components.data.records.samples import ChatSample, PreferenceSample

U, A = {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}
HUMAN, GPT = {"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}
PAIR = {"chosen": "A", "rejected": "B"}


@pytest.mark.parametrize(
    ("format", "record", "unread"),
    [
        ("alpaca", {"instruction": "U", "prompt": "P", "output": "A"}, ["prompt"]),
        ("alpaca", {"instruction": "U", "input": "I", "query": "Q", "output": "A"}, ["query"]),
        ("alpaca", {"instruction": "U", "output": "A", "response": "R"}, ["response"]),
        ("alpaca", {"prompt": "U", "query": "Q", "response": "A"}, []),
        ("preference", {"prompt": "U", "instruction": "I", "input": "N", **PAIR}, ["instruction", "input"]),
        ("preference", {"prompt": [U], "messages": [U], **PAIR}, ["messages"]),
        ("preference", {"instruction": "U", "input": "N", **PAIR}, []),
        ("preference", {"messages": [U], "history": [["Q", "R"]], **PAIR}, ["history"]),
        ("preference", {"prompt": "U", "chosen_messages": [A], **PAIR}, ["chosen_messages"]),
        ("unpaired", {"prompt": "U", "completion": "A", "label": True, "output": "B"}, ["output"]),
        ("unpaired", {"messages": [U, A], "label": True, "kto_tag": False}, ["kto_tag"]),
        ("unpaired", {"messages": [U, A], "conversations": [U, A], "label": True}, ["conversations"]),
        ("unpaired", {"instruction": "U", "input": "I", "output": "A", "label": True}, []),
        ("unpaired", {"instruction": "U", "output": "A", "prompt": "P", "label": True}, ["prompt"]),
        ("messages", {"messages": [{**U, "value": "V"}, A]}, ["messages[].value"]),
        (
            "messages",
            {"messages": [{**U, "loss": -3.5}, {**A, "weight": 1, "loss": 0.9}]},
            ["messages[].loss"],
        ),
        ("messages", {"messages": [{**U, "loss": 0}, {**A, "loss": True}]}, []),
        ("messages", {"messages": [U, A, U]}, ["messages[] after the last answer"]),
        ("unpaired", {"messages": [U, A, U], "label": True}, ["messages[] after the last answer"]),
        ("unpaired", {"messages": [U], "completion": "A", "label": True}, []),
        ("sharegpt", {"conversations": [HUMAN, GPT, HUMAN]}, ["conversations[] after the last answer"]),
        ("prompt_completion", {"prompt": [U], "completion": [A, U]}, ["completion[] after the last answer"]),
    ],
)
def test_a_field_in_whose_place_another_is_read(
    format: Format, record: dict[str, Any], unread: list[str]
) -> None:
    assert normalize(record, RecordOptions(format=format, strings="chat"), "a:1")[1] == unread


@pytest.mark.parametrize("own_first", [True, False])
def test_a_renamed_field_takes_the_place_of_another(own_first: bool) -> None:
    """In messages, too, whatever the order of their keys."""

    def ordered(fields: dict[str, Any]) -> dict[str, Any]:
        return fields if own_first else dict(reversed(fields.items()))

    messages = [ordered({"role": "user", "content": "X", "text": "U"}), A]
    record = ordered({"messages": [U, A], "talk": messages})
    options = RecordOptions(format="messages", columns={"messages": "talk", "content": "text"})
    sample, unread = normalize(record, options, "a:1")
    assert isinstance(sample, ChatSample)
    assert sample.messages == [U, A]
    assert unread == ["messages", "talk[].content"]
    swapped = RecordOptions(format="alpaca", columns={"instruction": "output", "output": "instruction"})
    assert normalize({"instruction": "A", "output": "U"}, swapped, "a:1") == (ChatSample([U, A], None), [])


def test_a_pair_without_a_prompt_keeps_its_system_turn() -> None:
    system = {"role": "system", "content": "S"}
    record = {"system": "S", "chosen": [U, A], "rejected": [U, {**A, "content": "B"}]}
    turn = {"system": "other", "chosen": [system, U, A], "rejected": [system, *record["rejected"]]}
    for answers, not_read in ((record, []), (turn, ["system"])):
        sample, unread = normalize(answers, RecordOptions(format="preference"), "a:1")
        assert isinstance(sample, PreferenceSample)
        assert sample.prompt == [system, U]
        assert unread == not_read


def test_a_field_that_a_system_turn_replaces_is_not_read() -> None:
    record = {"system": "other", "messages": [{"role": "system", "content": "S"}, U, A]}
    assert normalize(record, RecordOptions(format="messages"), "a:1")[1] == ["system"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"content": None, "refusal": "No."}, "'messages\\[\\].refusal'"),
        ({"content": "A", "training": 0.5}, "training of messages\\[1\\] is 0.5"),
    ],
)
def test_what_would_change_the_training_is_refused(answer: dict[str, Any], error: str) -> None:
    with pytest.raises(RecordError, match=error):
        normalize({"messages": [U, {"role": "assistant", **answer}]}, RecordOptions(format="messages"), "a:1")


def test_a_field_that_is_read_cannot_be_ignored() -> None:
    options = RecordOptions(format="messages", ignore_fields=("tools", "margin"), on_bad_record="skip")
    with pytest.raises(
        ConfigError, match=r"data\.ignore_fields: has 'tools', a field of a:1 that format messages reads"
    ) as caught:
        normalize({"messages": [U, A], "tools": [{"name": "f"}]}, options, "a:1")
    assert not isinstance(caught.value, RecordError)
    assert normalize({"messages": [U, A], "margin": 1}, options, "a:1")[1] == ["margin"]


def test_placeholders_of_ignored_media_are_not_trained_on() -> None:
    turns = [{"from": "human", "value": "<image>\nU<image>"}, {"from": "gpt", "value": "A <video>"}]
    record = {"conversations": turns, "images": ["a.jpg", "b.jpg"], "tools": [{"name": "<image>"}]}
    ignoring = RecordOptions(format="sharegpt", ignore_fields=("images",))
    sample, unread = normalize(record, ignoring, "a:1")
    assert isinstance(sample, ChatSample)
    assert sample.messages == [U, {"role": "assistant", "content": "A <video>"}], "it has no video"
    assert sample.tools == [{"type": "function", "function": {"name": "<image>"}}]
    assert unread == ["images", "<image>"]
    joined = [{"from": "human", "value": "One<image> two\n<image>\n    three"}, {"from": "gpt", "value": "A"}]
    sample, _ = normalize({"conversations": joined, "images": ["a.jpg"]}, ignoring, "a:1")
    assert isinstance(sample, ChatSample)
    assert sample.messages[0]["content"] == "One two\n    three"
    page = {"conversations": turns}
    assert normalize(page, ignoring, "a:1") == normalize(page, RecordOptions(format="sharegpt"), "a:1")
    pair = {"prompt": "<audio>U", "chosen": "A", "rejected": "B", "audios": ["a.wav"]}
    options = RecordOptions(format="preference", ignore_fields=("audios",))
    assert normalize(pair, options, "a:1") == (PreferenceSample("U", "A", "B", None), ["audios", "<audio>"])


@pytest.mark.parametrize("key", ["function_call", "functions"])
def test_former_calls_of_openai_are_refused(key: str) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    record = {"messages": [U, called if key == "function_call" else A, A], "functions": [{"name": "f"}]}
    ignored = ("functions",) if key == "function_call" else ()
    with pytest.raises(RecordError, match=key):
        normalize(record, RecordOptions(format="messages", ignore_fields=ignored), "a:1")


def test_flags_of_a_turn_may_not_contradict_each_other() -> None:
    with pytest.raises(RecordError, match=r"weight and train of messages\[1\] contradict each other"):
        normalize(
            {"messages": [U, {**A, "weight": 1, "train": False}]}, RecordOptions(format="messages"), "a:1"
        )
    sample, _ = normalize(
        {"messages": [U, A, U, {**A, "weight": 0, "train": False}]}, RecordOptions(format="messages"), "a:1"
    )
    assert isinstance(sample, ChatSample)
    assert sample.untrained == {3}


def test_every_turn_is_trained_on_or_some_are_not() -> None:
    record = {"messages": [U, {**A, "weight": 0}, U, A]}
    with pytest.raises(RecordError, match=r"excludes a turn from training, and data\.train_on_prompt"):
        normalize(record, RecordOptions(format="messages", train_on_prompt=True), "a:1")
    data = FilesData(train="a.jsonl", mask_history=True, train_on_prompt=True)
    with pytest.raises(ConfigError, match=r"data\.mask_history: data\.train_on_prompt=true"):
        data.check_kind("chat")


@pytest.mark.parametrize(
    "options", [{"default_system": "S"}, {"mask_history": True}, {"chat_template_kwargs": {"a": 1}}]
)
def test_segments_have_no_turns(options: dict[str, Any]) -> None:
    data = FilesData(train="a.jsonl", **options)
    data.check_formats({"segments", "messages"})
    with pytest.raises(ConfigError, match=f"data.{next(iter(options))}: has no effect on segments data"):
        data.check_formats({"segments"})


def test_a_null_takes_no_place() -> None:
    options = RecordOptions(format="messages", columns={"content": "text", "messages": "talk"})
    record = {"messages": [{**U, "text": None}, A], "talk": None}
    assert normalize(record, options, "a:1") == (ChatSample([U, A], None), [])
