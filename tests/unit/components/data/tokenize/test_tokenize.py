"""Samples are truncated, dropped and counted equally with and without workers, once per content."""

import copy
import ctypes
import json
import multiprocessing
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.contracts.errors import ConfigError
from components.data import progress
from components.data.data_sources import FileSource, StdlibSource
from components.data.records.options import RecordOptions
from components.data.records.samples import TextSample
from components.data.store.token_store import StoreWriter, TokenChunk, TokenStore
from components.data.tokenize import chat
from components.data.tokenize import workers as tokenize
from components.data.tokenize.chat import Encoded
from components.data.tokenize.encoder import Encoder, EncoderInput
from components.data.tokenize.truncation import fit
from components.data.tokenize.workers import batched, build_store, encode_batches
from components.data.tokenizer import PATH


@pytest.fixture(scope="module")
def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    return Encoder(tokenizer, "text", 16, "truncate", train_on_prompt=False)


@pytest.fixture(scope="module")
def chat_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    return Encoder(
        tokenizer, "chat", 64, "truncate", train_on_prompt=False, options=RecordOptions(format="messages")
    )


def encoded(prompt: int, answer: int, first: int = 100) -> Encoded:
    """Return prompt tokens 0, 1, ... and answer tokens ``first``, ..., the last of which is a stop token."""
    ids = [*range(prompt), *range(first, first + answer)]
    return Encoded(ids, [False] * prompt + [True] * answer, prompt, stop_trained=True)


# prompt, answers, max_length -> the kept tokens of the prompt and of each answer
@pytest.mark.parametrize(
    ("prompt", "answers", "max_length", "prompt_left", "answers_left"),
    [
        (6, [4], 10, range(6), [4]),
        (6, [4], 8, range(6), [2]),
        (6, [4], 5, range(5), [0]),
        (6, [4, 2], 10, range(6), [4, 2]),
        (6, [4, 2], 7, range(3, 6), [4, 2]),
        (6, [2, 4], 7, range(3, 6), [2, 4]),
        (6, [9, 2], 7, range(5, 6), [6, 2]),
        (6, [7, 2], 7, range(5, 6), [6, 2]),
        (0, [9, 2], 7, range(0), [7, 2]),
    ],
)
def test_truncation(
    prompt: int, answers: list[int], max_length: int, prompt_left: range, answers_left: list[int]
) -> None:
    sample = [encoded(prompt, answer, 100 * i) for i, answer in enumerate(answers, start=1)]
    fitted = fit(sample, max_length, "truncate")
    assert fitted is not None
    for i, (one, answer, left) in enumerate(zip(fitted, answers, answers_left, strict=True), start=1):
        assert one.input_ids == [*prompt_left, *range(100 * i, 100 * i + left)]
        assert one.mask == [False] * len(prompt_left) + [True] * left
        assert one.stop_trained == (left == answer)
        assert len(one.input_ids) <= max_length
    whole = max(answers) + prompt <= max_length
    assert (fitted is sample) == whole
    assert fit(sample, max_length, "drop") == (sample if whole else None)
    assert fit(sample, None, "drop") is sample


def test_a_long_history_is_cut_before_the_last_turn(chat_encoder: Encoder) -> None:
    """With data.mask_history only that turn is trained on; any other conversation keeps its beginning."""
    history = [{"role": role, "content": "word " * 30} for role in ("user", "assistant")]
    turns = [*history, {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hi."}]
    last = replace(chat_encoder, options=replace(chat_encoder.options, mask_history=True))
    chunk = last([({"messages": turns}, "file:1")])
    assert (chunk.truncated.tolist(), chunk.stop_trained.tolist()) == ([True], [True])
    assert 0 < chunk.mask.sum() < 10
    assert chat_encoder([({"messages": turns}, "file:1")]).stop_trained.tolist() == [False]


def test_a_chunk_counts_what_is_left_out(chat_encoder: Encoder) -> None:
    def item(question: str, answer: str) -> EncoderInput:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": turns}, "file:1"

    items = [item("Hello?", "Hi."), item("Hello?", "word " * 100), item("word " * 100, "Never seen.")]
    cut = chat_encoder(items)
    assert cut.left_out == {"unsupervised": 1}
    assert cut.truncated.tolist() == [False, True]
    assert cut.stop_trained.tolist() == [True, False]
    assert cut.lengths[1] == 64
    dropped = replace(chat_encoder, long_samples="drop")(items)
    assert (dropped.left_out, len(dropped.lengths)) == ({"dropped": 2}, 1)
    every = replace(chat_encoder, train_on_prompt=True)(items)
    assert not every.left_out["unsupervised"]
    assert every.mask.all()


def texts(number: int) -> Iterator[EncoderInput]:
    return ((TextSample(f"document {i} " * (i % 7 + 1)), f"file:{i}") for i in range(number))


def test_workers_give_the_same_in_the_same_order(text_encoder: Encoder) -> None:
    before = len(multiprocessing.active_children())
    alone = list(encode_batches(batched(texts(700)), text_encoder, 1, patience_s=0))
    assert len(multiprocessing.active_children()) == before
    workers = encode_batches(batched(texts(700)), text_encoder, 2, patience_s=0)
    shared = [next(workers)]
    assert len(multiprocessing.active_children()) == before + 2
    shared += workers
    assert len(multiprocessing.active_children()) == before
    assert len(shared) == len(alone) == 11
    for one, other in zip(shared, alone, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.lengths, other.lengths)


def test_workers_read_only_a_little_ahead_and_stop(text_encoder: Encoder) -> None:
    taken = 0

    def many() -> Iterator[EncoderInput]:
        nonlocal taken
        for taken in range(6400):
            yield TextSample("a document"), f"file:{taken}"

    chunks = encode_batches(batched(many()), text_encoder, 2, patience_s=0)
    for _ in range(3):
        next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert taken < 64 * 20


def test_a_mistake_in_a_record_is_reported_from_a_worker(chat_encoder: Encoder) -> None:
    items: list[EncoderInput] = [({"messages": []}, "file:7")] * 100
    with pytest.raises(ConfigError, match="file:7"):
        list(encode_batches(batched(iter(items)), chat_encoder, 2, patience_s=0))


class Lethal(Encoder):
    """An encoder that ends its process, as one that runs out of memory does."""

    def __call__(self, items: Any) -> Any:  # noqa: ARG002
        os._exit(9)


def test_a_worker_that_dies_is_reported(text_encoder: Encoder) -> None:
    lethal = Lethal(**{name: getattr(text_encoder, name) for name in text_encoder.__dataclass_fields__})
    batches = iter([list(texts(64))])
    with pytest.raises(ConfigError, match=r"data\.num_workers"):
        list(tokenize._encode_in_workers(batches, lethal, 1))


class Busy(Encoder):
    """A tokenizer that holds the lock of the interpreter for an hour, as a long text does."""

    def __call__(self, items: Any) -> Any:
        ctypes.PyDLL(None).sleep(3600)
        return super().__call__(items)


def test_no_worker_is_waited_for_after_an_error(text_encoder: Encoder) -> None:
    busy = Busy(**{name: getattr(text_encoder, name) for name in text_encoder.__dataclass_fields__})
    before = set(multiprocessing.active_children())

    def batches() -> Iterator[list[EncoderInput]]:
        yield list(texts(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(tokenize._encode_in_workers(batches(), busy, 2))
    assert set(multiprocessing.active_children()) == before


def test_long_items_are_encoded_one_by_one() -> None:
    lengths = [10, 2**20, 2**20, 5, 2**19, 2**19, 1, *[1] * 70]
    items: list[EncoderInput] = [({"a": ["x" * length]}, "file:1") for length in lengths]
    assert [len(batch) for batch in tokenize.batched(iter(items))] == [2, 1, 3, 64, 7]


@pytest.mark.parametrize("border", [" ", "\n", "\n\n  ", ""])
def test_a_long_document_has_the_tokens_of_its_text(
    text_encoder: Encoder, monkeypatch: pytest.MonkeyPatch, border: str
) -> None:
    monkeypatch.setattr(chat, "_PIECE", 50)
    monkeypatch.setattr(chat, "_AROUND", 20)
    text = border.join(f"word{n}, Füße {n * n}!" for n in range(300))
    pieces = list(chat._pieces(text, text_encoder.tokenizer))
    assert (len(pieces) > 20, "".join(pieces)) == (True, text)
    (found,) = chat.encode_sample(
        TextSample(text), text_encoder.tokenizer, train_on_prompt=False, origin="file:1"
    )
    whole = text_encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(found.input_ids) == [*whole, text_encoder.tokenizer.eos_token_id]
    assert len(found.mask) == len(found.input_ids)


def test_a_tokenizer_that_begins_every_text_anew_gets_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_PIECE", 50)
    text = "some words " * 100

    def prefixed(text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0, *map(ord, text)]}

    assert list(chat._pieces(text, prefixed)) == [text]  # type: ignore[arg-type]


def test_progress_is_logged(
    tmp_path: Path,
    source: FileSource,
    text_encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    Path(source.path).write_text('{"text": "one two three"}\n' * 9000)
    build_store(source, text_encoder, tmp_path / "cache", 1)
    assert re.fullmatch(
        r"tokenising data\.train=.*: 6,400 rows, [\d,]+/s, 0:\d\d:\d\d left", caplog.messages[99]
    )


# The cache


@pytest.fixture
def source(tmp_path: Path) -> FileSource:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    return FileSource(option="data.train", path=str(path))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list of the stores that were written, which excludes those found in the cache."""
    written: list[Path] = []
    original = tokenize._write_store

    def record(path: Path, *rest: Any) -> None:
        written.append(path)
        original(path, *rest)

    monkeypatch.setattr(tokenize, "_write_store", record)
    return written


def test_the_same_content_is_tokenised_once(
    tmp_path: Path, source: FileSource, text_encoder: Encoder, writes: list[Path]
) -> None:
    first, identity = build_store(source, text_encoder, tmp_path / "cache", 1)
    moved = replace(source, path=shutil.copy(source.path, tmp_path / "moved.jsonl"))
    for again in (source, moved):
        store, same = build_store(again, text_encoder, tmp_path / "cache", 1)
        assert (store, same) == (first, identity)
    assert len(writes) == 1
    text = text_encoder.tokenizer.decode(first.tokens(0, 0, 99))
    assert text.startswith("one two three")


def other_content(source: FileSource, encoder: Encoder) -> tuple[FileSource, Encoder]:
    Path(source.path).write_text('{"text": "one two threE"}\n{"text": "four five"}\n')
    return source, encoder


def other_tokenizer(source: FileSource, encoder: Encoder) -> tuple[FileSource, Encoder]:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokenizer.add_tokens(["three"])
    return source, replace(encoder, tokenizer=tokenizer)


def other_template(source: FileSource, encoder: Encoder) -> tuple[FileSource, Encoder]:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokenizer.chat_template += " "
    return source, replace(encoder, tokenizer=tokenizer)


class OwnSource(FileSource):
    """A source of a user's own package."""


@pytest.mark.parametrize(
    "change",
    [
        other_content,
        lambda source, encoder: (OwnSource(**vars(source)), encoder),
        other_tokenizer,
        other_template,
        lambda source, encoder: (replace(source, options=RecordOptions(format="text")), encoder),
        lambda source, encoder: (replace(source, options=RecordOptions(on_bad_record="skip")), encoder),
        lambda source, encoder: (source, replace(encoder, max_length=17)),
        lambda source, encoder: (source, replace(encoder, max_length=None)),
        lambda source, encoder: (source, replace(encoder, long_samples="drop")),
        lambda source, encoder: (source, replace(encoder, train_on_prompt=True)),
    ],
)
def test_another_content_or_setting_is_tokenised_again(
    tmp_path: Path,
    source: FileSource,
    text_encoder: Encoder,
    writes: list[Path],
    change: Callable[[FileSource, Encoder], tuple[FileSource, Encoder]],
) -> None:
    build_store(source, text_encoder, tmp_path / "cache", 1)
    build_store(*change(source, text_encoder), tmp_path / "cache", 1)
    assert len(set(writes)) == 2


def test_a_torn_store_is_built_again(
    tmp_path: Path, source: FileSource, text_encoder: Encoder, writes: list[Path]
) -> None:
    store, _ = build_store(source, text_encoder, tmp_path / "cache", 1)
    lengths = store.lengths.tolist()
    (store.path / "tokens").write_bytes(b"")
    again, _ = build_store(source, text_encoder, tmp_path / "cache", 1)
    assert again.lengths.tolist() == lengths
    assert len(writes) == 2


@pytest.mark.parametrize("kind", ["text", "unpaired"])
def test_an_interrupted_store_is_continued(
    tmp_path: Path, text_encoder: Encoder, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    path = tmp_path / "train.jsonl"
    turns = ({"prompt": f"Say {n}.", "completion": f"{n}", "label": n % 2 == 0} for n in range(200))
    records = ({"text": f"document {n}"} for n in range(200)) if kind == "text" else turns
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    source, encoder = FileSource(option="data.train", path=str(path)), replace(text_encoder, kind=kind)
    original, appended = StoreWriter.append, 0

    def interrupted(writer: StoreWriter, chunk: TokenChunk) -> None:
        nonlocal appended
        appended += 1
        if appended == 3:
            raise KeyboardInterrupt
        original(writer, chunk)

    monkeypatch.setattr(StoreWriter, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_store(source, encoder, tmp_path / "cache", 1)
    store, _ = build_store(source, encoder, tmp_path / "cache", 1)
    assert appended == 3 + 2  # the other two of four chunks
    straight, _ = build_store(source, encoder, tmp_path / "other", 1)
    for name in store.meta.sizes:
        assert (store.path / name).read_bytes() == (straight.path / name).read_bytes()


def test_concurrent_jobs_write_once(
    tmp_path: Path, source: FileSource, text_encoder: Encoder, writes: list[Path]
) -> None:
    found: list[TokenStore] = []

    def job() -> None:
        found.append(build_store(source, text_encoder, tmp_path / "cache", 1)[0])

    jobs = [threading.Thread(target=job) for _ in range(4)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()
    assert len(found) == 4
    assert len(writes) == 1


def test_a_folder_changes_with_its_files(tmp_path: Path, source: FileSource) -> None:
    folder = replace(source, path=str(Path(source.path).parent))
    before = folder.content(tmp_path / "cache")
    assert folder.content(tmp_path / "cache") == before
    (tmp_path / "more.jsonl").write_text('{"text": "six"}\n')
    assert folder.content(tmp_path / "cache") != before


def test_the_embedded_data_is_itself(tmp_path: Path) -> None:
    train = StdlibSource("train").content(tmp_path)
    assert StdlibSource("train").content(tmp_path) == train
    assert StdlibSource("eval").content(tmp_path) != train


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ('{"text": "a b"}', "chat", "format is text, and stage=sft does not train on that.\nUse stage=pt"),
        ('{"instruction": "a", "output": "b"}', "preference", "format is alpaca, and stage=dpo"),
        ('{"instruction": "a", "output": "b"}', "text", "Use stage=sft"),
        (
            '{"prompt": "a", "completion": "b", "label": true}',
            "chat",
            r"Use stage=kto, a data.format without labels \(prompt_completion, messages, sharegpt or alp",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "chat",
            "x.jsonl:1: .* has no assistant turn",
        ),
        ('{"text": ', "text", "x.jsonl:1: malformed JSON"),
        ('{"words": 1}', "text", "does not recognise"),
    ],
)
def test_mistakes_in_a_file(
    tmp_path: Path, text_encoder: Encoder, record: str, kind: Any, message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(record + "\n")
    encoder = replace(text_encoder, kind=kind)
    with pytest.raises(ConfigError, match=message):
        build_store(FileSource(option="data.train", path=str(path)), encoder, tmp_path / "cache", 1)
    assert not list((tmp_path / "cache" / "tokens").glob("*/"))


@pytest.mark.parametrize(
    ("max_length", "long_samples", "message"),
    [
        (8, "truncate", "0 longer .* 1 without a token"),
        (8, "drop", "1 longer than data.max_length=8, 0 without"),
    ],
)
def test_a_source_with_nothing_to_train_on_is_refused(
    tmp_path: Path, chat_encoder: Encoder, max_length: int, long_samples: Any, message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"instruction": "many words that will not fit in at all", "output": "b"}\n')
    encoder = replace(chat_encoder, max_length=max_length, long_samples=long_samples)
    with pytest.raises(ConfigError, match=f"data.train=.*x.jsonl: no sample is left .*{message}"):
        build_store(FileSource(option="data.train", path=str(path)), encoder, tmp_path / "cache", 1)


def test_reasoning_that_the_template_does_not_read_is_listed(
    tokenizer: PreTrainedTokenizerBase, chat_encoder: Encoder
) -> None:
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2", "thinking": "1 + 1"}]
    plain = [turns[0], turns[1] | {"thinking": ""}]
    records: list[EncoderInput] = [({"messages": turns}, "a:1"), ({"messages": plain}, "a:2")]
    assert chat_encoder(records).unread == {"messages[].thinking": 1}
    parts = [{"type": "reasoning", "value": "1 + 1"}, {"type": "text", "value": "2"}]
    of_parts = {"messages": [turns[0], {"role": "assistant", "content": parts}]}
    assert chat_encoder([(of_parts, "a:3")]).unread == {"messages[].content[].reasoning": 1}
    parts[0]["value"] = ""
    assert not chat_encoder([(of_parts, "a:3")]).unread
    parts[0]["value"] = "1 + 1"
    beside = {"messages": [turns[0], {"role": "assistant", "content": "2"}], "metadata": {"thinking": "1"}}
    assert chat_encoder([(beside, "a:4")]).unread == {"metadata": 1}, "it has no messages"
    reads = copy.copy(tokenizer)
    reads.chat_template = f"{{# reasoning_content #}}{tokenizer.chat_template}"
    assert not replace(chat_encoder, tokenizer=reads)([(of_parts, "a:3")]).unread
    ignores = replace(chat_encoder, options=replace(chat_encoder.options, ignore_fields=("reasoning",)))
    assert ignores([(of_parts, "a:3")]).unread == {"messages[].content[].reasoning": 1}
    named = {"talk": [turns[0], {"from": "gpt", "value": "2", "thinking": "1 + 1"}]}
    options = RecordOptions(format="sharegpt", columns={"conversations": "talk"})
    assert replace(chat_encoder, options=options)([(named, "a:4")]).unread == {"conversations[].thinking": 1}
    reads = copy.copy(tokenizer)
    reads.chat_template = f"{{# enable_thinking #}}{tokenizer.chat_template}"
    assert replace(chat_encoder, tokenizer=reads)(records).unread == {"messages[].thinking": 1}
    reads.chat_template = f"{{# thinking #}}{tokenizer.chat_template}"
    assert not replace(chat_encoder, tokenizer=reads)(records).unread
