"""Unpaired data from records to micro-batches, and the audit's counts of equal pairs and long prompts."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.contracts.batch import DESIRABLE, IGNORE, KL_COMPLETION, UNDESIRABLE, Batch
from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError
from components.data import FilesData, PreparedData, StdlibData
from components.data.data_sources import FileSource
from components.data.records.formats import detect, normalize
from components.data.records.options import RecordError, RecordOptions
from components.data.records.record_files import Unreadable
from components.data.records.samples import UnpairedSample
from components.data.records.split_pairs import pair_numbers, split_pairs
from components.data.tokenize.encoder import KLPair, with_kl_completions
from components.data.tokenizer import PATH

NAMES = ("ant", "bee", "cat", "dog", "eel")
LABELS = (True, False, False, True, True)


def record(name: str, label: bool) -> dict[str, Any]:
    return {"prompt": f"What is a {name}?", "completion": f"A {name} is small.", "label": label}


def prepare(folder: Path, records: list[Any], kind: Any, **options: Any) -> PreparedData:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    data = FilesData(train=str(path), cache_dir=str(folder / "cache"), shuffle=False, **options)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    return data.prepare(kind, tokenizer, seed=0, global_batch_size=4, max_steps=2, epochs=None)


def unpaired(folder: Path, **options: Any) -> PreparedData:
    return prepare(folder, [record(*row) for row in zip(NAMES, LABELS, strict=True)], "unpaired", **options)


def microbatches(prepared: PreparedData, step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    loader = prepared.train_loader(BatchShard(4, 2, rank, size))
    return loader.microbatches(step)


def found(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str, int]]:
    """Yield the animals in the prompt and the targets of every real sequence, and its label."""
    for batch in batches:
        assert batch.sequence_labels is not None
        owners = batch.sequence_ids()
        for number, label in enumerate(batch.sequence_labels.tolist()):
            if batch.seqlens[number]:
                ids, labels = batch.input_ids[owners == number], batch.labels[owners == number]
                text, target = tokenizer.decode(ids), tokenizer.decode(labels[labels != IGNORE])
                prompt = text.split("What is a ")[1]
                yield prompt[:3], target.removeprefix("A ")[:3], label


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_an_answer_is_followed_by_that_of_the_next_sample(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, packing: Any
) -> None:
    prepared = unpaired(tmp_path, packing=packing, max_length=64)
    steps = [0] if packing == "bfd" else [0, 1]
    rows = [row for step in steps for row in found(microbatches(prepared, step), tokenizer)]
    expected = []
    for i, (name, label) in enumerate(zip(NAMES, LABELS, strict=True)):
        expected += [
            (name, name, DESIRABLE if label else UNDESIRABLE),
            (name, NAMES[(i + 1) % 5], KL_COMPLETION),
        ]
    assert sorted(rows) == sorted(expected)
    assert rows[::2] + rows[1::2] == [r for r in rows if r[2] != 2] + [r for r in rows if r[2] == 2]


def test_what_is_not_trained_on_is_not_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    prepared = unpaired(tmp_path, packing="none")
    [source] = prepared.audit.train.sources
    loader = prepared.train_loader(BatchShard(4, 2))
    stats = [loader.stats(step) for step in range(2)]
    answers = [b.select(b.sequence_labels != KL_COMPLETION) for s in range(2) for b in loader.microbatches(s)]  # type: ignore[arg-type]
    assert [one.num_samples for one in stats] == [4, 1]
    assert sum(one.num_tokens for one in stats) == source.tokens == sum(int(b.seqlens.sum()) for b in answers)
    assert sum(one.num_labels for one in stats) == sum(int((b.labels != IGNORE).sum()) for b in answers)
    assert source.supervised == sum(one.num_labels for one in stats)
    assert (source.samples, source.desirable, source.format) == (5, 0.6, "unpaired")


def test_an_empty_answer_leaves_out_only_itself(tmp_path: Path) -> None:
    records = [record(*row) for row in zip(NAMES, LABELS, strict=True)]
    records[2]["completion"] = " "
    prepared = prepare(tmp_path, records, "unpaired", packing="none")
    [source] = prepared.audit.train.sources
    assert (source.samples, source.unsupervised) == (4, 1)


def test_padding_keeps_its_place(tmp_path: Path) -> None:
    """An empty row stands for an answer and a mismatched one, so all micro-batches have one shape."""
    prepared = unpaired(tmp_path, packing="none")
    first, last = (microbatches(prepared, 1, rank, 2)[0] for rank in (0, 1))
    assert first.sequence_labels is not None
    assert last.sequence_labels is not None
    assert first.sequence_labels.tolist() == [DESIRABLE, KL_COMPLETION, -1, KL_COMPLETION]
    assert last.sequence_labels.tolist() == [-1, KL_COMPLETION] * 2
    for batch in (first, last):
        assert [len(batch.select(batch.sequence_labels == KL_COMPLETION).labels)] == [2]  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_selected_sequences_are_as_they_were(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, packing: Any
) -> None:
    for batch in microbatches(unpaired(tmp_path, packing=packing, max_length=64), 0):
        batch.ref_logps = torch.rand(batch.labels.shape)
        assert batch.sequence_labels is not None
        keep = batch.sequence_labels != KL_COMPLETION
        part = batch.select(keep)
        rows = list(found([batch], tokenizer))
        assert list(found([part], tokenizer)) == [row for row in rows if row[2] != KL_COMPLETION]
        assert torch.equal(part.seqlens, batch.seqlens[keep])
        assert part.ref_logps is not None
        for name in ("position_ids", "labels", "ref_logps"):
            mine, whole = getattr(part, name), getattr(batch, name)
            for new, old in enumerate(keep.nonzero()[:, 0].tolist()):
                length = int(batch.seqlens[old])
                kept = mine[part.sequence_ids() == new][:length]
                assert torch.equal(kept, whole[batch.sequence_ids() == old][:length])
        nothing = batch.select(torch.zeros_like(keep))
        assert nothing.labels.tolist() == [[IGNORE]]
        assert nothing.seqlens.tolist() == [0]
        assert (nothing.cu_seqlens is None) == (batch.cu_seqlens is None)
        assert nothing.labelled().numel() == 0


def test_pairs_of_neighbours_do_not_depend_on_batches() -> None:
    samples = [UnpairedSample(f"p{i}", f"c{i}", True, None, "") for i in range(3)]
    torn, odd = Unreadable(RecordError("torn")), {"prompt": "p", "completion": "c"}
    items = [(torn, "a"), (samples[0], "b"), (odd, "c"), (torn, "d"), (samples[1], "e"), (samples[2], "f")]
    pairs = list(with_kl_completions(items, RecordOptions(format="unpaired")))
    assert [origin for _, origin in pairs] == ["a", "b", "c", "d", "e", "f"]
    assert [item.kl_completion for item, _ in pairs if isinstance(item, KLPair)] == ["c1", "c2", "c0"]
    assert [origin for item, origin in pairs if isinstance(item, Unreadable)] == ["a", "c", "d"]


def test_a_long_neighbour_cuts_nobody(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    long = {"prompt": "What is a gnu?", "completion": "A gnu " + "eats " * 99, "label": False}
    for long_samples, samples in (("truncate", 2), ("drop", 1)):
        prepared = prepare(
            tmp_path,
            [record("ant", True), long],
            "unpaired",
            max_length=40,
            long_samples=long_samples,
            packing="none",
        )
        [source] = prepared.audit.train.sources
        assert (source.samples, source.truncated, source.dropped) == (samples, samples - 1, 2 - samples)
        batch = microbatches(prepared, 0)[0]
        owners = batch.sequence_ids()
        answer, mismatched = (tokenizer.decode(batch.input_ids[owners == i]) for i in (0, 1))
        assert "What is a ant?" in answer
        assert "A ant is small." in answer
        assert "A gnu eats" in mismatched
        assert int(batch.seqlens[1]) == 40


QUESTION, ANSWER = "What is a ant?", "A ant is small."
USER, ASSISTANT = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
SPELLINGS: list[dict[str, Any]] = [
    {"prompt": QUESTION, "completion": ANSWER, "label": True},
    {"prompt": [USER], "completion": [ASSISTANT], "label": 1},
    {"messages": [USER, ASSISTANT], "kto_tag": True},
    {
        "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}],
        "kto_tag": True,
    },
    {"instruction": QUESTION, "output": ANSWER, "kto_tag": True},
    {"messages": [USER, ASSISTANT], "label": True},
    {"prompt": QUESTION, "response": ANSWER, "label": True},
]


@pytest.mark.parametrize("spelled", SPELLINGS, ids=lambda row: ", ".join(row))
def test_spellings(spelled: dict[str, Any]) -> None:
    assert detect(spelled, "unpaired", "x") == "unpaired"
    sample, _ = normalize(spelled, RecordOptions(format="unpaired", strings="chat"), "x")
    assert isinstance(sample, UnpairedSample)
    assert (sample.prompt, sample.completion) == ([USER], [ASSISTANT])
    assert sample.desirable is True


def test_data_without_labels_is_explained(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}]
    with pytest.raises(ConfigError, match="stage=kto does not train on that") as caught:
        prepare(tmp_path, chats, "unpaired")
    assert "give every record a 'label'" in str(caught.value)
    with pytest.raises(ConfigError, match="give every record a 'label'"):
        prepare(tmp_path, [{"prompt": "a", "completion": "b"}], "unpaired")
    with pytest.raises(ConfigError, match=r"train.jsonl:2: field 'label' is missing"):
        prepare(tmp_path, [record("ant", True), {"prompt": "a", "completion": "b"}], "unpaired")


def test_pairs_are_split(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs: list[dict[str, Any]] = [
        {
            "prompt": f"What is a {name}?",
            "chosen": f"A {name} is small.",
            "rejected": f"{name.upper()} is large.",
        }
        for name in NAMES[:3]
    ]
    pairs[1] = {  # both answers contain the prompt
        side: [
            {"role": "user", "content": "What is a bee?"},
            {"role": "assistant", "content": pairs[1][side]},
        ]
        for side in ("chosen", "rejected")
    }
    prepared = prepare(tmp_path, pairs, "unpaired", strings="chat", packing="none", max_length=64)
    [source] = prepared.audit.train.sources
    assert (source.format, source.samples) == ("preference", 6)
    rows = [row for step in (0, 1) for row in found(microbatches(prepared, step), tokenizer)]
    prompts, answers = ("ant", "bee", "cat") * 2, ("ant", "bee", "cat", "ANT", "BEE", "CAT")
    labels = [DESIRABLE] * 3 + [UNDESIRABLE] * 3
    mismatched = answers[1:] + answers[:1]  # never the other answer to the same prompt
    others = zip(prompts, mismatched, [KL_COMPLETION] * 6, strict=True)
    assert {*rows} == {*zip(prompts, answers, labels, strict=True), *others}


@pytest.mark.parametrize("number", [1, 999, 1000, 1001, 2500])
def test_answers_are_numbered_as_their_pairs(number: int, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = (json.dumps({"prompt": "a", "chosen": f"{i}", "rejected": f"{i}"}) for i in range(number))
    path.write_text("\n".join("{" if i == 7 else line for i, line in enumerate(lines)))
    source = FileSource(option="data.train", path=str(path), options=RecordOptions(on_bad_record="skip"))
    items = split_pairs(source.items("unpaired").items)
    origins = [int(origin.rpartition(":")[2]) - 1 for _, origin in items]
    assert origins == pair_numbers(2 * number).tolist()


def test_both_answers_of_a_pair_are_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = [
        {"prompt": f"What is a {name}?", "chosen": "Small.", "rejected": "Large."} for name in "abcdefghij"
    ]
    prepared = prepare(tmp_path, pairs, "unpaired", packing="none", eval_fraction=0.3)
    loader = prepared.eval_loaders(BatchShard(4, 2, 0, 1))["eval"]
    prompts = [
        tokenizer.decode(batch.input_ids[batch.sequence_ids() == i]).split("?")[0]
        for step in range(loader.num_steps)
        for batch in loader.microbatches(step)
        for i in range(0, len(batch.seqlens), 2)
        if batch.seqlens[i]
    ]
    assert len(prompts) == 6
    assert all(prompts.count(prompt) == 2 for prompt in prompts)


def test_a_bad_pair_is_one_bad_record(tmp_path: Path) -> None:
    pairs: list[dict[str, Any]] = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(5)]
    del pairs[3]["rejected"]
    prepared = prepare(tmp_path, pairs, "unpaired", packing="none", on_bad_record="skip")
    [source] = prepared.audit.train.sources
    assert (source.samples, source.bad) == (8, 1)
    loader = prepared.train_loader(BatchShard(4, 2))
    names = {origin for step in (0, 1) for origin in loader.sample_ids(step)}
    assert names <= {f"data.train:{i}" for i in (1, 2, 3, 5)}
    del pairs[4]["rejected"]
    with pytest.raises(ConfigError, match="2 of 5 records cannot be read"):
        prepare(tmp_path, pairs, "unpaired")


def test_the_embedded_data_has_both_labels(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    samples = list(StdlibData(cache_dir=str(tmp_path)).train_sources()[0][0].items("unpaired").items)[:200]
    labels = [sample.desirable for sample, _ in samples if isinstance(sample, UnpairedSample)]
    assert len(labels) == 200
    assert 60 < sum(labels) < 140


def test_the_same_answer_twice_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"prompt": "What is a ant?", "chosen": "An insect.", "rejected": "A stone."}
    same = good | {"rejected": "An insect."}
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    # These answers differ only after the tokens that truncation keeps.
    long = good | {"chosen": "very " * 60 + "small", "rejected": "very " * 60 + "large"}
    with caplog.at_level(logging.WARNING, logger="components"):
        prepared = prepare(
            tmp_path, [good, same, {"chosen": chat, "rejected": chat}, long], "preference", max_length=40
        )
    [source] = prepared.audit.train.sources
    assert (source.samples, source.identical) == (1, 3)
    assert "3 pair(s) with the same answer twice are left out" in caplog.text
    with pytest.raises(ConfigError, match="2 with the same answer twice"):
        prepare(tmp_path, [same, same], "preference", max_length=40)


@pytest.mark.parametrize(("long_samples", "kept"), [("truncate", 2), ("drop", 1)])
def test_long_prompts_are_counted(tmp_path: Path, long_samples: Any, kept: int) -> None:
    good = {"prompt": "What is a ant?", "chosen": "An insect.", "rejected": "A stone."}
    long = good | {"prompt": "Why? " * 60}
    prepared = prepare(tmp_path, [good, long], "preference", max_length=40, long_samples=long_samples)
    [source] = prepared.audit.train.sources
    assert (source.samples, source.long_prompts, source.cut_prompts) == (kept, 1, kept - 1)


def test_prompts_of_long_answers_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An answer is kept as a whole, and leaves little of its prompt."""
    good = {"prompt": "What is a ant? " * 3, "chosen": "An insect.", "rejected": "A stone."}
    long = good | {"rejected": "A stone, or a bird? " * 8}
    with caplog.at_level(logging.WARNING, logger="components"):
        prepared = prepare(tmp_path, [good, long, long], "preference", max_length=60)
    [source] = prepared.audit.train.sources
    assert (source.truncated, source.long_prompts, source.cut_prompts) == (2, 0, 2)
    assert "2 sample(s) keep less than half of their prompt; raise data.max_length" in caplog.text
