"""The data group from options to loaders, and the errors for its invalid options."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from components.contracts.batch import IGNORE
from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError
from components.data import FilesData, PreparedData, StdlibData, data_sources
from components.data.store.digests import digest
from components.data.tokenize import encoder
from components.json_text import as_type
from tests.unit.components.data.store.test_indexed import write_indexed

SHARED = Path(__file__).parents[5] / "shared" / "data"
ONE_RANK = BatchShard(global_batch_size=4, micro_batch_size=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_texts(path: Path, number: int, word: str = "word") -> str:
    lines = [json.dumps({"text": f"{word} {i} " * (i % 5 + 2)}) for i in range(number)]
    path.write_text("\n".join(lines))
    return str(path)


def write_chats(path: Path, number: int, word: str) -> str:
    lines = [json.dumps({"prompt": f"{word} {i}", "completion": "yes"}) for i in range(number)]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return write_texts(tmp_path / "train.jsonl", 40)


def prepare(
    data: Any, tokenizer: PreTrainedTokenizerBase, kind: Any = "text", **changes: Any
) -> PreparedData:
    settings: dict[str, Any] = {"seed": 0, "global_batch_size": 4, "max_steps": None, "epochs": 1}
    prepared: PreparedData = data.prepare(kind, tokenizer, **settings | changes)
    return prepared


def documents(
    prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, *, evaluate: bool = False
) -> list[str]:
    """Return the texts of an unpacked run in order."""
    loader = prepared.eval_loaders(ONE_RANK)["eval"] if evaluate else prepared.train_loader(ONE_RANK)
    batches = [batch for step in range(loader.num_steps) for batch in loader.microbatches(step)]
    return [
        tokenizer.decode(ids[:length], skip_special_tokens=True)
        for batch in batches
        for ids, length in zip(batch.input_ids.tolist(), batch.seqlens.tolist(), strict=True)
        if length
    ]


@pytest.mark.parametrize(
    ("file", "kind", "format"),
    [
        ("alpaca_en_demo.json", "chat", "alpaca"),
        ("dpo_en_demo.json", "preference", "preference"),
        ("c4_demo.jsonl", "text", "text"),
        ("wiki_demo.txt", "text", "text"),
    ],
)
def test_real_files(tokenizer: PreTrainedTokenizerBase, file: str, kind: Any, format: str) -> None:
    if not (SHARED / file).exists():
        pytest.skip("no shared data beside the checkout")
    data = FilesData(train=str(SHARED / file), max_length=512, eval_fraction=0.05)
    prepared = prepare(data, tokenizer, kind, max_steps=20, epochs=None)
    assert prepared.num_steps == 20
    loader = prepared.train_loader(ONE_RANK)
    capacity = 512 * (2 if kind == "preference" else 1)
    for step in range(20):
        batches, stats = loader.microbatches(step), loader.stats(step)
        assert sum(int(batch.seqlens.sum()) for batch in batches) == stats.num_tokens
        assert sum(int((batch.labels != IGNORE).sum()) for batch in batches) == stats.num_labels > 0
        assert all(batch.input_ids.shape[1] <= 2 * capacity for batch in batches)
        assert max(int(batch.seqlens.max()) for batch in batches) <= 512
    [source] = prepared.audit.train.sources
    assert source.format == format
    assert prepared.audit.train.fill_rate is not None
    assert prepared.audit.train.fill_rate > (0.85 if kind == "preference" else 0.95)  # pairs leave more gaps
    assert source.unsupervised == source.dropped == 0


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_the_embedded_data(
    tokenizer: PreTrainedTokenizerBase, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = data_sources.stdlib_records
    # All modules of the standard library would take seconds.
    monkeypatch.setattr(
        data_sources,
        "stdlib_records",
        lambda *which: (r for r, _ in zip(records(*which), range(90), strict=False)),
    )
    prepared = prepare(StdlibData(), tokenizer, kind)
    loader = prepared.train_loader(ONE_RANK)
    assert prepared.eval_loaders(ONE_RANK).keys() == {"eval"}
    assert prepared.packing == ("concat" if kind == "text" else "bfd")
    assert loader.num_steps == prepared.num_steps
    assert loader.microbatches(0)[0].cu_seqlens is not None
    assert (loader.microbatches(0)[0].pair_index is not None) == (kind == "preference")
    if kind != "text":
        assert tokenizer.decode(prepared.prompt()).endswith("assistant\n")


def test_it_travels_as_json(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    data = FilesData(train=texts, eval_fraction=0.1, packing="none")
    prepared = prepare(data, tokenizer)
    again = data.restore(json.loads(json.dumps(prepared.to_json())))
    assert again == prepared
    assert documents(again, tokenizer) == documents(prepared, tokenizer)


def test_a_second_run_starts_at_once(
    texts: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = FilesData(train=texts, eval_fraction=0.1)
    first = prepare(data, tokenizer, epochs=2)
    monkeypatch.setattr(encoder, "encode_sample", None)
    monkeypatch.setattr("components.data.plans.plan_epoch", None)
    assert prepare(data, tokenizer, epochs=2) == first


def test_a_torn_plan_is_made_again(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    data = FilesData(train=texts, packing="none")
    prepared = prepare(data, tokenizer)
    before = documents(prepared, tokenizer)
    Path(prepared.train.plans, "epoch_00000", "segments.npy").write_bytes(b"\x93NUMPY")
    assert documents(prepare(data, tokenizer), tokenizer) == before


def test_shuffle_false_keeps_the_order_of_the_file(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = [json.loads(line)["text"] for line in Path(texts).read_text().splitlines()]
    plain, shuffled = (
        documents(prepare(FilesData(train=texts, packing="none", shuffle=shuffle), tokenizer), tokenizer)
        for shuffle in (False, True)
    )
    assert plain == lines
    assert shuffled != lines
    assert sorted(shuffled) == sorted(lines)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("text", {"default_system": "S"}, "data.default_system: a document has no turns"),
        ("text", {"strings": "chat"}, "data.strings: a document has no turns"),
        ("text", {"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs: a document has no turns"),
        ("text", {"roles": {"a": "user"}}, "data.roles: a document has no turns"),
        ("text", {"columns": {"role": "from"}}, "data.columns.role: a document has no turns"),
        ("text", {"mask_history": True}, "data.mask_history: with stage=pt"),
        ("preference", {"mask_history": True}, "data.mask_history: with stage=dpo"),
        ("ranked", {"train_on_prompt": True}, "data.train_on_prompt: a score is that of a whole text"),
    ],
)
def test_options_that_a_stage_does_not_read(
    texts: str, tokenizer: PreTrainedTokenizerBase, kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(FilesData(train=texts, **options), tokenizer, kind)


def test_strings_that_no_record_has(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    alpaca = tmp_path / "alpaca.jsonl"
    alpaca.write_text('{"instruction": "Why?", "output": "Because."}\n')
    data = FilesData(train=str(alpaca), strings="chat", packing="none")
    with pytest.raises(ConfigError, match=r"data\.strings: the records are alpaca, .*; leave it out"):
        prepare(data, tokenizer, "chat")
    prepare(replace(data, eval=write_chats(tmp_path / "pairs.jsonl", 3, "a")), tokenizer, "chat")
    options: tuple[dict[str, Any], ...] = ({"columns": {"role": "r"}}, {"roles": {"bot": "assistant"}})
    for option in options:
        with pytest.raises(
            ConfigError, match=r"data\.[a-z.]+: .* on alpaca data, which has no messages; leave"
        ):
            prepare(FilesData(train=str(alpaca), packing="none", **option), tokenizer, "chat")


def test_limits_of_samples(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    train, held = write_texts(tmp_path / "train.jsonl", 40), write_texts(tmp_path / "eval.jsonl", 9)
    limits: dict[str, Any] = {"packing": "none", "max_samples": 20, "max_eval_samples": 3}
    audit = prepare(FilesData(train=train, eval=held, **limits), tokenizer).audit
    assert (audit.train.sources[0].samples, audit.eval["eval"].sources[0].samples) == (20, 3)
    audit = prepare(FilesData(train=train, eval_fraction=0.25, **limits), tokenizer).audit
    assert (audit.train.sources[0].samples, audit.eval["eval"].sources[0].samples) == (15, 3)
    entries: list[Any] = [{"path": train, "max_samples": number} for number in (30, 5)]
    audit = prepare(FilesData(sources=entries, **limits), tokenizer).audit
    assert [source.samples for source in audit.train.sources] == [20, 5]
    prefix = write_indexed(tmp_path / "corpus", [[1, 2, 3]] * 30, np.uint16)
    with pytest.raises(ConfigError, match=r"is read as a whole; set data\.max_samples=null\.$"):
        prepare(FilesData(train=f"{prefix}.bin", **limits), tokenizer)
    with pytest.raises(ConfigError, match=r"set data\.max_eval_samples=null"):
        prepare(FilesData(train=train, eval=f"{prefix}.bin", packing="none", max_eval_samples=3), tokenizer)


@pytest.mark.parametrize(
    ("sources", "strategy", "counts"),
    [
        ([{"share": 3}, {"share": 1}], "first_exhausted", (24, 8)),  # the second ends first
        ([{"share": 3}, {"share": 1}], "all_exhausted", (40, 13)),  # 8 / 13.33 of a sample are drawn
        ([{"share": 0.5}, {"share": 0.5}], "all_exhausted", (40, 40)),
        ("0.75 A 0.25 B", "first_exhausted", (24, 8)),
    ],
)
def test_shares_are_of_the_samples_of_an_epoch(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase, sources: Any, strategy: Any, counts: Any
) -> None:
    rare = write_chats(tmp_path / "rare.jsonl", 8, "rare")
    common = write_chats(tmp_path / "common.jsonl", 40, "common")
    if isinstance(sources, str):
        sources = sources.replace("A", common).replace("B", rare)
    else:
        sources = [{"path": path, **share} for path, share in zip((common, rare), sources, strict=True)]
    data = FilesData(sources=sources, stopping_strategy=strategy, packing="none")
    prepared = prepare(data, tokenizer, "chat")
    for epoch in range(2):
        plan = prepared.train.open()[1].plan(epoch)
        found = [int((plan.segments[:, 0] < 40).sum()), int((plan.segments[:, 0] >= 40).sum())]
        assert found[0] == counts[0]
        assert found[1] - counts[1] in (0, 1)  # a part of a sample is rounded by chance


def test_a_share_of_documents_is_one_of_tokens(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text("\n".join(json.dumps({"text": "word " * 400}) for _ in range(40)))
    sources = [{"path": texts, "share": 1}, {"path": str(long), "share": 1}]
    prepared = prepare(FilesData(sources=sources, max_length=64), tokenizer)
    segments = prepared.train.open()[1].plan(0).segments
    tokens = segments[:, 2] - segments[:, 1]
    short_tokens, long_tokens = tokens[segments[:, 0] < 40].sum(), tokens[segments[:, 0] >= 40].sum()
    assert short_tokens == sum(source.tokens for source in prepared.audit.train.sources[:1])
    assert abs(long_tokens - short_tokens) <= 405  # one document, because its number is whole


def test_several_evaluation_sets(tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    sets = {name: write_texts(tmp_path / f"{name}.jsonl", 3 + i, name) for i, name in enumerate("ab")}
    prepared = prepare(FilesData(train=texts, eval=sets, packing="none"), tokenizer)
    assert [(name, split.sources[0].samples) for name, split in prepared.audit.eval.items()] == [
        ("eval/a", 3),
        ("eval/b", 4),
    ]
    assert json.loads(prepared.audit.to_json()).keys() == {"train", "eval/a", "eval/b"}
    again = as_type(PreparedData, json.loads(json.dumps(prepared.to_json())))
    assert [loader.stats(0).num_samples for loader in again.eval_loaders(ONE_RANK).values()] == [3, 4]


def test_weights_are_repeats(tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    rare = write_texts(tmp_path / "rare.jsonl", 10, "rare")
    data = FilesData(sources=[{"path": texts, "repeats": 0.5}, {"path": rare, "repeats": 3}], packing="none")
    prepared = prepare(data, tokenizer, epochs=2)
    seen = documents(prepared, tokenizer)
    # An epoch has 20 of 40 texts and 3 x 10: 50 rows make 13 steps, of which the last is short.
    assert prepared.num_steps == 26
    for epoch in (seen[:50], seen[50:]):
        assert sum(text.startswith("rare") for text in epoch) == 30
    halves = [{text for text in epoch if text.startswith("word")} for epoch in (seen[:50], seen[50:])]
    assert len(halves[0]) == len(halves[1]) == 20
    assert halves[0] != halves[1]


@pytest.mark.parametrize(
    ("often", "of_same_fraction"), [(0.5, True), (1.5, True), (1.0, False), (0.25, False)]
)
def test_sources_of_the_same_fraction_are_drawn_from_by_themselves(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase, often: float, of_same_fraction: bool
) -> None:
    """Their identity differs from that of older checkpoints, which drew from them as from one source."""
    rare = write_texts(tmp_path / "rare.jsonl", 20, "rare")
    sources = [{"path": texts, "repeats": 0.5}, {"path": rare, "repeats": often}]
    with patch("components.data.splits.digest", wraps=digest) as made:
        prepared = prepare(FilesData(sources=sources, packing="none"), tokenizer, epochs=2)
    assert any("drawn by source" in call.args[0] for call in made.call_args_list) == of_same_fraction
    seen = documents(prepared, tokenizer)
    for epoch in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert sum(text.startswith("rare") for text in epoch) == 20 * often


def test_held_out_samples_are_not_trained_on(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    data = FilesData(train=texts, packing="none", eval_fraction=0.25)
    by_seed = []
    for seed in (0, 1):
        prepared = prepare(data, tokenizer, seed=seed, epochs=2)
        trained = documents(prepared, tokenizer)
        held = documents(prepared, tokenizer, evaluate=True)
        assert (len(set(trained)), len(trained), len(held)) == (30, 60, 10)
        assert not set(trained) & set(held)
        assert (prepared.audit.train.sources[0].samples, prepared.audit.eval["eval"].sources[0].samples) == (
            30,
            10,
        )
        by_seed.append(held)
    assert by_seed[0] != by_seed[1]


def test_a_limit_of_held_out_samples_leaves_all_sources(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    other = write_texts(tmp_path / "other.jsonl", 40, "other")
    data = FilesData(sources=[{"path": texts}, {"path": other}], eval_fraction=0.5, max_eval_samples=20)
    prepared = prepare(data, tokenizer)
    samples = [source.samples for source in prepared.audit.eval["eval"].sources]
    assert sum(samples) == 20
    assert min(samples) > 5
    assert sum(source.samples for source in prepared.audit.train.sources) == 40


def test_what_was_held_out_stays_so_with_another_filter(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Records of different lengths, of which a shorter ``max_length`` leaves out some."""
    path = tmp_path / "texts.jsonl"
    texts = [f"{n} " * (1 + n % 5) for n in range(100)]
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    data = FilesData(train=str(path), packing="none", eval_fraction=0.2, long_samples="drop", max_length=64)
    long, short = (prepare(replace(data, max_length=length), tokenizer) for length in (64, 8))
    trained = {*documents(long, tokenizer)}
    held = documents(short, tokenizer, evaluate=True)
    assert 0 < len(held) < 20
    assert not trained & {*held}


def test_an_eval_file_is_read_in_order_to_its_end(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    held = write_texts(tmp_path / "eval.jsonl", 7, "held")
    data = FilesData(train=texts, eval=held, packing="none", drop_last=True)
    prepared = prepare(data, tokenizer)
    lines = [json.loads(line)["text"] for line in Path(held).read_text().splitlines()]
    assert documents(prepared, tokenizer, evaluate=True) == lines


def test_no_evaluation(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    prepared = prepare(FilesData(train=texts), tokenizer)
    assert not prepared.eval_loaders(ONE_RANK)
    assert not prepared.audit.eval


@pytest.mark.parametrize(
    ("max_steps", "epochs", "drop_last", "steps"),
    [
        (None, 2, False, 22),
        (None, 2, True, 20),
        (None, 0.5, False, 6),
        (None, 2.25, False, 25),
        (None, 0.01, False, 1),
        (None, 1e-10, False, 1),
        (None, 0.6, True, 6),
        (None, 4.1, True, 41),
        (25, None, False, 25),
        (3, 7, False, 3),
        (30, 2, False, 30),
        (22, None, False, 22),
        (22, None, True, 22),
        (10**9, None, False, 10**9),
        (None, 10**9, True, 10**10),
    ],
)
def test_steps_and_epochs(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_steps: int | None,
    epochs: float | None,
    drop_last: bool,
    steps: int,
) -> None:
    train = write_texts(tmp_path / "train.jsonl", 42)  # 11 steps of 4, the last of 2
    data = FilesData(train=train, packing="none", drop_last=drop_last)
    prepared = prepare(data, tokenizer, max_steps=max_steps, epochs=epochs)
    assert (prepared.num_steps, len(list(Path(prepared.train.plans).glob("epoch_*")))) == (steps, 1)
    assert prepared.train_loader(ONE_RANK).num_steps == steps


def test_an_error_of_rounding_adds_no_step(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    data = FilesData(train=write_texts(tmp_path / "train.jsonl", 200), packing="none")
    assert 50 * 1.1 > 55
    assert prepare(data, tokenizer, epochs=1.1).num_steps == 55


@pytest.mark.parametrize("packing", ["concat", "none"])
def test_an_indexed_data_set(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, packing: Any) -> None:
    rng = np.random.default_rng(0)
    corpus = [rng.integers(0, 8000, length).tolist() for length in (5, 40, 1, 17, 9)]
    prefix = write_indexed(tmp_path / "corpus", corpus, np.uint16)
    texts = write_texts(tmp_path / "more.jsonl", 5)
    data = FilesData(
        sources=[{"path": f"{prefix}.bin", "repeats": 2}, {"path": texts}],
        max_length=16,
        packing=packing,
        shuffle=False,
    )
    prepared = prepare(data, tokenizer)
    indexed, text = prepared.audit.train.sources
    assert (indexed.format, indexed.samples, indexed.unsupervised) == ("indexed", 4, 1)
    assert indexed.tokens == (71 if packing == "concat" else 5 + 16 + 16 + 9)
    assert indexed.stop_token_trained is None
    assert text.samples == 5
    loader = prepared.train_loader(ONE_RANK)
    labels = sum(loader.stats(step).num_labels for step in range(loader.num_steps))
    assert labels == 2 * indexed.supervised + text.supervised
    first = loader.microbatches(0)[0].input_ids[0, :5].tolist()
    assert first == corpus[0]


def test_the_audit(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def record(question: str, answer: str) -> str:
        return json.dumps({"instruction": question, "output": answer, "rate [/s]": 1})

    path = tmp_path / "train.jsonl"
    path.write_text(
        "\n".join([record("Hi?", "Yes."), record("Hi?", "word " * 99), record("word " * 99, "No.")])
    )
    audit = prepare(FilesData(train=str(path), max_length=32, packing="none"), tokenizer, "chat").audit
    [source] = audit.train.sources
    assert (source.samples, source.truncated, source.dropped, source.unsupervised) == (2, 1, 0, 1)
    assert source.stop_token_trained == 0.5
    assert (source.length_max, source.length_p99) == (32, 32)
    assert source.tokens - 32 == source.length_p50 < 32
    assert json.loads(audit.to_json())["train"]["sources"][0]["samples"] == 2
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(audit.render())
    shown = console.export_text()
    assert "stop token trained" in shown
    assert "rate [/s] (3)" in shown


def test_unusual_turns_have_a_rule_and_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    user, system = {"role": "user", "content": "U"}, {"role": "system", "content": "S"}
    answer, empty = ({"role": "assistant", "content": text} for text in ("A", " "))
    chats = [
        [system, user, answer],
        [user, user, empty, user, answer],
        [user, user, answer, system, user, answer],
        [user, answer, user],
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    [source] = prepare(FilesData(train=str(path)), tokenizer, "chat").audit.train.sources
    assert source.samples == 4
    assert source.unread == {"messages[] after the last answer": 1}
    counts = {"empty answer": 1, "system turn after the first turn": 1, "two user turns in a row": 2}
    assert source.unusual == counts
    pairs = [{"prompt": "U", "chosen": "A", "rejected": text} for text in ("B", "")]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    [source] = prepare(FilesData(train=str(path)), tokenizer, "preference").audit.train.sources
    assert (source.samples, source.unsupervised, source.unusual) == (1, 1, {"empty answer": 1})


def test_an_evaluation_set_within_the_training_data_is_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    val = tmp_path / "val.jsonl"
    prepare(FilesData(train=str(tmp_path), eval=str(val)), tokenizer, "text")
    assert caplog.messages == [f"data.eval: {val} is also in the training data"]
    with (
        pytest.raises(ConfigError, match=r"other\.jsonl: no such file"),
        patch("components.data.config.build_store", side_effect=AssertionError("records are read")),
    ):
        prepare(FilesData(train=str(val), eval=str(tmp_path / "other.jsonl")), tokenizer, "text")
    caplog.clear()
    prepare(FilesData(train=str(tmp_path / "train.jsonl"), eval=str(val)), tokenizer, "text")
    assert not caplog.messages


@pytest.mark.parametrize(("long_samples", "number"), [("truncate", 3), ("drop", 3), ("truncate", 1)])
def test_samples_that_are_mostly_left_out_are_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, long_samples: Any, number: int
) -> None:
    turns = [{"role": "user", "content": "a " * 100}, {"role": "assistant", "content": "b"}]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in [turns] * number + [short] * 2))
    data = FilesData(train=str(path), max_length=32, long_samples=long_samples)
    warnings = prepare(data, tokenizer, "chat").audit.warnings()
    said = "3 sample(s) without a target, or too long, are left out, and 2 are kept"
    assert any(said in line for line in warnings) == (number == 3)


def test_answers_without_a_stop_token_are_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "train.jsonl"
    for end, warned in (("</s>", 1), (tokenizer.eos_token, 0)):
        segments = [{"text": "Hi?", "label": False}, {"text": f"Yes.{end}", "label": True}]
        path.write_text(json.dumps({"segments": segments}))
        warnings = prepare(FilesData(train=str(path)), tokenizer, "chat").audit.warnings()
        assert len(warnings) == warned
        assert all(
            ": 0.0% of the samples end with a stop token that is trained on" in one for one in warnings
        )


def test_the_identity_follows_the_data_not_its_place(
    tmp_path: Path, texts: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = FilesData(train=texts)
    identity = prepare(data, tokenizer).identity
    moved = write_texts(tmp_path / "moved.jsonl", 40)
    assert (
        prepare(FilesData(train=moved, cache_dir=str(tmp_path / "c")), tokenizer, epochs=3).identity
        == identity
    )
    others = [
        prepare(replace(data, max_length=9), tokenizer),
        prepare(replace(data, packing="none"), tokenizer),
        prepare(replace(data, shuffle=False), tokenizer),
        prepare(replace(data, eval_fraction=0.5), tokenizer),
        prepare(data, tokenizer, seed=1),
        prepare(FilesData(sources=[{"path": texts, "repeats": 2}]), tokenizer),
        prepare(FilesData(train=write_texts(tmp_path / "other.jsonl", 41)), tokenizer),
    ]
    assert identity not in {other.identity for other in others}


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert StdlibData(cache_dir=str(tmp_path / "a")).cache() == tmp_path / "a"
    assert StdlibData().cache() == tmp_path / "cache"
    monkeypatch.delenv("RUNNER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert StdlibData().cache() == tmp_path / ".cache" / "runner"
    monkeypatch.setenv("RUNNER_CACHE", "~nobody-at-all/cache")
    with pytest.raises(ConfigError, match=r"^RUNNER_CACHE=~nobody-at-all/cache: there is no user"):
        StdlibData().cache()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "data.train, data.sources: both are null; give one of them"),
        ({"train": "a", "sources": [{"path": "b"}]}, "data.train, data.sources: both are given"),
        ({"train": "a", "max_length": 1}, "data.max_length: must be at least 2, got 1"),
        ({"train": "a", "num_workers": 0}, "data.num_workers: must be at least 1, got 0"),
        ({"train": "a", "eval_fraction": 1.0}, "data.eval_fraction: must be at least 0 and below 1, got 1.0"),
        ({"train": "a", "eval_fraction": -0.1}, "data.eval_fraction: .* got -0.1"),
        ({"train": "a", "eval_fraction": float("nan")}, "data.eval_fraction: .* got nan"),
        (
            {"train": "a", "eval": "b", "eval_fraction": 0.1},
            "data.eval_fraction: is not read if data.eval",
        ),
        ({"sources": []}, "data.sources: is empty"),
        ({"sources": [{"path": "a", "repaets": 1}]}, r"data.sources\[0\].repaets: .*did you mean repeats"),
        ({"sources": [{"path": "a"}, {"repeats": 1}]}, r"data.sources\[1\].path: must be a path, got None"),
        ({"sources": [{"path": "a", "repeats": 0}]}, r"data.sources\[0\].repeats: .*got 0"),
        ({"sources": [{"path": "a", "share": -1}]}, r"data.sources\[0\].share: must be .*got -1"),
        (
            {"sources": [{"path": "a", "share": 1, "repeats": 2}]},
            r"data.sources\[0\].share: .*remove repeats",
        ),
        (
            {"sources": [{"path": "a", "share": 1}, {"path": "b"}]},
            r"data.sources: .*give every source a share",
        ),
        ({"sources": "0.7 a.jsonl 0.3"}, r"data.sources: .*is not a line of shares and paths; use '0.7"),
        ({"sources": "a.jsonl 0.7"}, r"data.sources: .*is not a line of shares and paths; use '0.7"),
        (
            {"sources": [{"path": "a"}], "stopping_strategy": "all_exhausted"},
            r"data.stopping_strategy: is only read with shares; give",
        ),
        ({"train": "a", "buffer_size": 9}, r"data.buffer_size: is only read with data.streaming=true"),
        ({"train": "a", "streaming": True, "buffer_size": 0}, r"data.buffer_size: must be at least 1"),
        (
            {"train": "a", "streaming": True, "eval_fraction": 0.1},
            r"data.eval_fraction: a stream .*data.eval",
        ),
        ({"train": "a", "streaming": True, "drop_last": True}, r"data.drop_last: a stream .*every batch"),
        (
            {"sources": "1 a 1 b", "streaming": True, "stopping_strategy": "all_exhausted"},
            r"data.stopping_strategy: a stream .* begins again",
        ),
        (
            {"sources": [{"path": "a", "repeats": 2}], "streaming": True},
            r"data.sources: a stream .*give sources a share",
        ),
        (
            {"sources": "99 a 1 b", "streaming": True, "buffer_size": 50},
            r"data.buffer_size: less than one of 50 records is of data.sources\[1\], by its share; raise it",
        ),
        ({"train": "a.bin", "streaming": True}, r"data.streaming: a.bin is an indexed data set.*; leave"),
        ({"train": "a", "eval": {"a/b": "c"}}, r"data.eval: 'a/b' is not a name .*; use letters"),
        (
            {"sources": [{"path": "a.bin", "columns": {"text": "a"}}]},
            r"data.sources\[0\].columns: has no effect on indexed data",
        ),
        ({"sources": [{"path": "a", "columns": {"text": ["a"]}}]}, r"data.sources\[0\].columns: must be"),
        ({"sources": [{"path": "a", "repeats": "2"}]}, r"data.sources\[0\].repeats: .*got '2'"),
        ({"sources": [{"path": "a", "repeats": float("inf")}]}, r"data.sources\[0\].repeats"),
        (
            {"sources": [{"path": "a", "format": "xml"}]},
            r"data.sources\[0\].format: 'xml' is not one of auto, text",
        ),
        (
            {"sources": [{"path": "hub:a", "revision": 12}]},
            r"data.sources\[0\].revision: must be text, got 12; put",
        ),
        (
            {"sources": [{"path": "hub:a", "split": "x"}, {"path": "b.jsonl"}], "split": "y"},
            "data.split: every data set of the hub has its own; remove it",
        ),
        (
            {"sources": [{"path": "hub:a", "split": "x"}], "split": "y", "eval": "hub:a", "eval_split": "z"},
            "data.split: every data set of the hub has its own; remove it",
        ),
        (
            {"train": "a.jsonl", "split": "y", "eval": "hub:a", "eval_split": "z"},
            "data.split: only data sets of the hub have one; use",
        ),
        ({"sources": [{"train": "a"}]}, r"data.sources\[0\].train: nothing reads this key; use path\.$"),
        ({"sources": [{"path": "a", "eval": "b"}]}, r"nothing reads this key; use data\.eval\.$"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FilesData(**options)


@pytest.mark.parametrize(
    ("options", "kind", "settings", "message"),
    [
        ({"train": "missing.jsonl"}, "text", {}, "missing.jsonl: no such file"),
        (
            {"train": "missing.jsonl", "streaming": True},
            "text",
            {"max_steps": 4},
            "missing.jsonl: no such file",
        ),
        (
            {"streaming": True},
            "text",
            {"max_steps": None, "epochs": 1},
            "run.max_steps: is null, but a stream",
        ),
        ({"train": "missing.bin"}, "text", {}, "missing.idx: no such file"),
        ({"packing": "concat"}, "chat", {}, "data.packing: concat .*stage=sft.*data.packing=bfd"),
        ({"train_on_prompt": True}, "text", {}, "data.train_on_prompt: a document has no prompt"),
        ({"eval": "missing.jsonl"}, "text", {}, "missing.jsonl: no such file"),
        ({"eval_fraction": 0.999}, "text", {}, "data.eval_fraction: 0.999 of 40 sample.* leaves none"),
        ({"cache_dir": "/dev/null/x"}, "text", {}, "data.cache_dir: cannot make /dev/null/x"),
        (
            {"drop_last": True, "packing": "none"},
            "text",
            {"global_batch_size": 41},
            "run.global_batch_size: 41 is more than the 40 row.*data.drop_last",
        ),
    ],
)
def test_mistakes_found_while_preparing(
    texts: str,
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
    kind: Any,
    settings: dict[str, Any],
    message: str,
) -> None:
    data = FilesData(**{"train": texts} | options)
    with pytest.raises(ConfigError, match=message) as error:
        prepare(data, tokenizer, kind, **settings)
    assert len(str(error.value).splitlines()) <= 2


def test_an_epoch_without_a_sample_is_refused(texts: str, tokenizer: PreTrainedTokenizerBase) -> None:
    data = FilesData(sources=[{"path": texts, "repeats": 1e-6}])
    with pytest.raises(
        ConfigError, match=r"data\.sources: no sample is drawn in epoch 0; raise their repeats"
    ):
        prepare(data, tokenizer)


@pytest.mark.parametrize(
    ("kind", "options", "documents", "message"),
    [
        ("chat", {}, [[1, 2]], "an indexed data set is text; use stage=pt"),
        ("text", {"format": "alpaca"}, [[1, 2]], "an indexed data set is text"),
        ("text", {}, [[1, 9000]], "token 9000, but the tokenizer's vocabulary is 8192"),
        ("text", {}, [[1], [2]], "no sequence is left"),
        (
            "text",
            {"columns": {"text": "a"}},
            [[1, 2]],
            "data.columns: has no effect on indexed .*leave it out",
        ),
        ("text", {"ignore_fields": ["a"]}, [[1, 2]], "data.ignore_fields: has no effect on indexed data"),
        ("text", {"on_bad_record": "skip"}, [[1, 2]], "data.on_bad_record: has no effect on indexed data"),
    ],
)
def test_mistakes_with_indexed_data(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: Any, options: Any, documents: Any, message: str
) -> None:
    prefix = write_indexed(tmp_path / "corpus", documents)
    with pytest.raises(ConfigError, match=message):
        prepare(FilesData(train=f"{prefix}.bin", **options), tokenizer, kind)


def test_shared_prompts_make_another_plan(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Shared prompts change the plans of training and evaluation, but not the samples."""
    sides = {"chosen": "A number.", "rejected": "I do not know."}
    pairs = [{"prompt": "What is this? " * (i + 1), **sides} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    data = FilesData(
        train=str(tmp_path / "pairs.jsonl"), eval_fraction=0.2, long_samples="drop", max_length=256
    )
    whole, shared = (
        prepare(replace(data, share_prompt=on), tokenizer, "preference", global_batch_size=2)
        for on in (False, True)
    )
    assert whole.identity != shared.identity
    shard = replace(ONE_RANK, global_batch_size=2)
    for opened in (shared.train_loader(shard), shared.eval_loaders(shard)["eval"]):
        assert all(batch.prefix_lengths is not None for batch in opened.microbatches(0))
    assert whole.audit.train.sources == shared.audit.train.sources
    assert shared.audit.train.rows < whole.audit.train.rows


def test_samples_are_named_by_their_record(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Ids name source and record despite omitted records, for pairs and for documents that are cut."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        pairs = [{"prompt": "Say.", "chosen": f"{path.stem} {n}", "rejected": "no"} for n in range(5)]
        pairs[1]["rejected"] = pairs[1]["chosen"]  # omitted, since both answers are equal
        path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    data = FilesData(sources=[{"path": str(path)} for path in paths], max_length=64)
    loader = prepare(data, tokenizer, "preference").train_loader(ONE_RANK)
    named = [name for step in range(loader.num_steps) for name in loader.sample_ids(step)]
    assert sorted(named) == [f"data.sources[{s}]:{n}" for s in (0, 1) for n in (1, 3, 4, 5)]
    write_indexed(tmp_path / "corpus", [[1, 2, 3], [4], [5, 6]])
    loader = prepare(FilesData(train=str(tmp_path / "corpus"), max_length=2), tokenizer).train_loader(
        ONE_RANK
    )
    assert sorted(loader.sample_ids(0)) == ["data.train:1", "data.train:3"]


def test_records_are_counted_over_chunks(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    texts = ["word " * (200 if n % 7 == 0 else 3) for n in range(500)]
    path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    data = FilesData(train=str(path), max_length=16, packing="none", long_samples="drop", shuffle=False)
    loader = prepare(data, tokenizer).train_loader(ONE_RANK)
    named = [name for step in range(loader.num_steps) for name in loader.sample_ids(step)]
    assert named == [f"data.train:{n + 1}" for n in range(500) if n % 7]
