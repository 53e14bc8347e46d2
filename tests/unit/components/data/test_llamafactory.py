"""``data=llamafactory``: data sets as a dataset_info.json of LLaMA-Factory describes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.data import LlamaFactoryData, PreparedData
from components.data.records.options import RecordError

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data"
TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
TURNS = [{"from": "human", "value": "U"}, {"from": "gpt", "value": "A"}]
OPENAI = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]
ANSWERED = "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], SampleKind, str]] = {
    "alpaca": ({}, {"instruction": "U", "input": "", "output": "A"}, "chat", ANSWERED),
    "columns": (
        {"columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
        {"q": "U", "a": "A", "s": "S", "h": [["U0", "A0"]], "input": "not named, so not read"},
        "chat",
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU0<|im_end|>\n<|im_start|>assistant\nA0<|im_end|>\n"
        + ANSWERED,
    ),
    "documents": ({"columns": {"prompt": "body"}}, {"body": "U"}, "text", "U<|im_end|>"),
    "sharegpt": ({"formatting": "sharegpt"}, {"conversations": TURNS}, "chat", ANSWERED),
    "openai": (
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": TAGS},
        {"messages": OPENAI},
        "chat",
        ANSWERED,
    ),
    "other-tags": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "dialog"},
            "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "client", "assistant_tag": "bot"},
        },
        {"dialog": [{"who": "client", "said": "U"}, {"who": "bot", "said": "A"}]},
        "chat",
        ANSWERED,
    ),
    "ranking": (
        {
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
        },
        {"conversations": TURNS[:1], "good": TURNS[1], "bad": {"from": "gpt", "value": "B"}},
        "preference",
        ANSWERED,
    ),
    "ranking-alpaca": (
        {"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
        {"q": "U", "good": "A", "bad": "B"},
        "preference",
        ANSWERED,
    ),
    "kto": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": TAGS},
        {"messages": OPENAI, "label": False},
        "unpaired",
        ANSWERED,
    ),
    "kto-alpaca": (
        {"columns": {"prompt": "q", "response": "a", "kto_tag": "good"}},
        {"q": "U", "a": "A", "good": True},
        "unpaired",
        ANSWERED,
    ),
}


def describe(folder: Path, entries: dict[str, Any]) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def prepare(
    folder: Path, kind: SampleKind, tokenizer: PreTrainedTokenizerBase, names: Any = "mine", **options: Any
) -> PreparedData:
    data = LlamaFactoryData(
        dataset_info=str(folder), dataset=names, cache_dir=str(folder / "cache"), packing="none", **options
    )
    return data.prepare(kind, tokenizer, seed=0, global_batch_size=1, max_steps=1, epochs=None)


def trained(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, sequence: int = 0) -> str:
    """Return the targets of a sequence."""
    stored = prepared.train.stores[0].open()
    length = int(stored.lengths[sequence])
    tokens, mask = stored.tokens(sequence, 0, length), stored.mask(sequence, 0, length)
    text: str = tokenizer.decode(tokens[mask])
    return text


def first_text(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase) -> str:
    tokens = prepared.train.stores[0].open()
    text: str = tokenizer.decode(tokens.tokens(0, 0, int(tokens.lengths[0])))
    return text


@pytest.mark.parametrize(("entry", "record", "kind", "text"), CASES.values(), ids=CASES)
def test_an_entry(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    entry: dict[str, Any],
    record: dict[str, Any],
    kind: SampleKind,
    text: str,
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([record] * 3))
    describe(tmp_path, {"mine": {"file_name": "a.json", **entry}})
    prepared = prepare(tmp_path, kind, tokenizer)
    assert prepared.audit.train.sources[0].samples == 3
    assert first_text(prepared, tokenizer) == text
    answers = "".join(piece for piece in ("A0<|im_end|>", "A<|im_end|>") if piece in text)
    assert trained(prepared, tokenizer) == (answers or text)
    if kind == "preference":
        assert trained(prepared, tokenizer, 1) == "B<|im_end|>"
    if kind == "unpaired":
        label = record.get("label", record.get("good"))
        assert prepared.train.stores[0].open().desirable.tolist() == [label] * 3


def test_the_turns_of_the_assistant_are_trained_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    call = '{"name": "f", "arguments": {}}'
    turns = [
        TURNS[0],
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "7"},
        TURNS[1],
    ]
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": [*turns, *TURNS]}]))
    describe(tmp_path, {"mine": {"file_name": "a.json", "formatting": "sharegpt"}})
    called, first, last, rest = trained(prepare(tmp_path, "chat", tokenizer), tokenizer).split("<|im_end|>")
    assert '"f"' in called
    assert (first, last, rest) == ("A", "A", "")
    masked = prepare(tmp_path, "chat", tokenizer, mask_history=True)
    assert trained(masked, tokenizer) == "A<|im_end|>"


def test_several_data_sets_some_of_their_samples_and_what_is_not_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    record = {"instruction": "U", "input": "", "output": "A", "id": 1}
    (tmp_path / "a.json").write_text(json.dumps([record] * 5))
    (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n")
    describe(tmp_path, {"a": {"file_name": "a.json", "num_samples": 2}, "b": {"file_name": "b.jsonl"}})
    prepared = prepare(tmp_path, "chat", tokenizer, "a, b", eval_dataset="b")
    assert [source.samples for source in prepared.audit.train.sources] == [2, 1]
    fewer = prepare(tmp_path, "chat", tokenizer, "a, b", max_samples=1)
    assert [source.samples for source in fewer.audit.train.sources] == [1, 1]
    assert prepare(tmp_path, "chat", tokenizer, ("a", "b")).audit.train == prepared.audit.train
    assert prepared.audit.train.sources[0].unread == {"id": 2}
    assert [store.open().origin(0) for store in prepared.train.stores] == [
        "data.dataset[a]:1",
        "data.dataset[b]:1",
    ]
    assert prepared.audit.eval.keys() == {"eval"}
    both = prepare(tmp_path, "chat", tokenizer, "a, b", eval_dataset="a, b")
    assert both.audit.eval.keys() == {"eval/a", "eval/b"}


@pytest.mark.parametrize(("strategy", "number"), [("first_exhausted", 2), ("all_exhausted", 8)])
def test_shares_of_data_sets(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, strategy: str, number: int
) -> None:
    record = {"instruction": "U", "input": "", "output": "A"}
    for name, records in (("a", 4), ("b", 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps([record] * records))
    describe(tmp_path, {name: {"file_name": f"{name}.json"} for name in "ab"})
    options: dict[str, Any] = {"shares": [0.5, 0.5], "stopping_strategy": strategy}
    prepared = prepare(tmp_path, "chat", tokenizer, "a, b", **options)
    assert len(prepared.train.open()[1].plan(0).segments) == number


def test_images_are_refused_by_name(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"messages": OPENAI, "pictures": ["a.jpg"]}]))
    columns = {"messages": "messages", "images": "pictures"}
    describe(
        tmp_path,
        {"mine": {"file_name": "a.json", "formatting": "sharegpt", "columns": columns, "tags": TAGS}},
    )
    with pytest.raises(RecordError, match=r"'images', and only text .* data.ignore_fields=\[images\]"):
        prepare(tmp_path, "chat", tokenizer)
    prepared = prepare(tmp_path, "chat", tokenizer, ignore_fields=["images"])
    assert prepared.audit.train.sources[0].unread == {"images": 1}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"dataset": "mnie"}, "data.dataset: .* describes no data set 'mnie'; did you mean mine"),
    "unknown evaluation name": ({"eval_dataset": "x"}, "data.eval_dataset: .* describes no data set 'x'"),
    "nothing": ({"dataset": None}, "data.dataset_info, data.dataset: give both"),
    "no file": (
        {"dataset_info": "/no/such/folder"},
        "data.dataset_info: /no/such/folder is not a file; give",
    ),
    "script": ({"dataset": "script"}, "dataset_info.json: script.script_url: is not supported; remove it"),
    "modelscope": (
        {"dataset": "elsewhere"},
        "names ms_hub_url, which is not read, but no file_name",
    ),
    "split of a file": ({"dataset": "half"}, r"half.split: a file has none; remove it, or name a file"),
    "shares": ({"shares": [0.5, 0.5]}, r"data.shares: has 2 number\(s\), but data.dataset 1 name\(s\); give"),
    "no share": ({"shares": [0]}, r"data.shares: must be numbers above 0, got \[0\]; correct"),
    "strategy": ({"stopping_strategy": "all_exhausted"}, "data.stopping_strategy: is only read with shares"),
    "formatting": ({"dataset": "odd"}, "odd.formatting: 'chatml' is not alpaca, sharegpt or openai"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    entries = {
        "mine": {"file_name": "a.json", "file_sha1": "0"},
        "script": {"script_url": "a"},
        "elsewhere": {"ms_hub_url": "a/b"},
        "half": {"file_name": "a.json", "split": "test"},
        "odd": {"file_name": "a.json", "formatting": "chatml"},
    }
    describe(tmp_path, entries)
    with pytest.raises(ConfigError, match=message):
        LlamaFactoryData(**{"dataset_info": str(tmp_path), "dataset": "mine", **options})


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real files under {SHARED}")
@pytest.mark.parametrize(
    ("entry", "kind", "count"),
    [
        ({"file_name": "alpaca_en_demo.json"}, "chat", 999),
        (
            {
                "file_name": "dpo_en_demo.json",
                "ranking": True,
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
            },
            "preference",
            300,
        ),
        ({"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}}, "text", 300),
        ({"file_name": "wiki_demo.txt", "columns": {"prompt": "text"}}, "text", 30),
    ],
    ids=["alpaca", "dpo", "c4", "wiki"],
)
def test_its_demo_files(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, entry: dict[str, Any], kind: SampleKind, count: int
) -> None:
    (tmp_path / entry["file_name"]).symlink_to(SHARED / entry["file_name"])
    describe(tmp_path, {"mine": entry})
    assert prepare(tmp_path, kind, tokenizer).audit.train.sources[0].samples == count
