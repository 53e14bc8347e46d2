"""``data.on_bad_record``: a bad record ends the preparation with a count, or is left out and named."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from components.contracts.data import SampleKind
from components.contracts.errors import ConfigError
from components.data import FilesData, PreparedData

USER = {"role": "user", "content": "Hi"}
GOOD = [{"messages": [USER, {"role": "assistant", "content": f"Answer {n}."}]} for n in range(6)]
QUESTION: dict[str, Any] = {"messages": [USER]}
EMPTY = {"messages": [USER, {"role": "assistant", "content": " "}]}
IMAGE = {"messages": [USER, {"role": "assistant", "content": [{"type": "image_url"}]}]}
LINES = [
    *map(json.dumps, GOOD[:3]),
    json.dumps(QUESTION),
    "{torn",
    json.dumps(EMPTY),
    "[1]",
    json.dumps(IMAGE),
]
LINES += map(json.dumps, GOOD[3:])


def prepare(
    folder: Path,
    lines: list[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: SampleKind = "chat",
    **options: Any,
) -> PreparedData:
    path = folder / "x.jsonl"
    path.write_text("\n".join(lines) + "\n")
    data = FilesData(train=str(path), cache_dir=str(folder / "cache"), packing="none", **options)
    return data.prepare(kind, tokenizer, seed=0, global_batch_size=2, max_steps=2, epochs=None)


def test_the_first_bad_record_ends_it_with_the_number_of_all(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, LINES, tokenizer)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path}/x.jsonl:4: the conversation has no assistant turn")
    assert second == "4 of 11 records cannot be read; correct them, or set data.on_bad_record=skip."


def test_the_first_fault_is_named_also_if_a_later_one_ends_the_reading(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\n,\n" + "a,b\n" * 2000 + '"open,c\n')
    data = FilesData(train=str(path), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"a\.csv:2: "):
        data.prepare("chat", tokenizer, seed=0, global_batch_size=2, max_steps=2, epochs=None)


def test_one_bad_record_is_not_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(tmp_path, [*LINES[:4]], tokenizer)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_records_are_left_out_and_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.data.tokenize.workers._PATIENCE_S", 0.0)
    prepared = prepare(tmp_path, LINES, tokenizer, on_bad_record="skip", num_workers=num_workers)
    audit = prepared.audit.train.sources[0]
    assert (audit.samples, audit.bad, audit.unsupervised) == (6, 4, 1)
    places = [f"{tmp_path}/x.jsonl:{line}" for line in (4, 5, 7, 8)]
    assert [line.partition(": ")[0] for line in audit.first_bad] == places
    assert audit.first_bad[1].partition(": ")[2].startswith("malformed JSON")
    assert any("4 record(s) that cannot be read are left out" in line for line in prepared.audit.warnings())
    run = tmp_path / "run"
    run.mkdir()
    prepared.write_bad_records(run)
    rows = [json.loads(line) for line in (run / "bad_records.jsonl").read_text().splitlines()]
    assert [row["origin"] for row in rows] == places
    assert [row["source"] for row in rows] == ["data.train"] * 4
    assert rows[1]["reason"].startswith("malformed JSON")
    # The samples keep the numbers of their records.
    stored = prepared.train.stores[0].open()
    assert [stored.origin(n) for n in range(6)] == [f"data.train:{n}" for n in (1, 2, 3, 9, 10, 11)]


def test_nothing_is_written_if_all_records_are_good(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    prepared = prepare(tmp_path, LINES[:3], tokenizer, on_bad_record="skip")
    prepared.write_bad_records(tmp_path)
    assert not (tmp_path / "bad_records.jsonl").exists()


def test_mismatched_answers_are_those_of_good_records(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = [
        {"prompt": [USER], "completion": row["messages"][1:], "label": n % 2 == 0}
        for n, row in enumerate(GOOD)
    ]
    bad = {**good[0], "label": "perhaps"}
    lines = [json.dumps(row) for row in (bad, *good[:2], bad, *good[2:])]
    prepared = prepare(tmp_path, lines, tokenizer, "unpaired", on_bad_record="skip")
    clean = tmp_path / "clean"
    clean.mkdir()
    expected = prepare(clean, [json.dumps(row) for row in good], tokenizer, "unpaired")
    stored, wanted = prepared.train.stores[0].open(), expected.train.stores[0].open()
    assert prepared.audit.train.sources[0].bad == 2
    assert stored.lengths.tolist() == wanted.lengths.tolist()
    for sequence, length in enumerate(wanted.lengths.tolist()):
        assert (stored.tokens(sequence, 0, length) == wanted.tokens(sequence, 0, length)).all()


def test_an_answer_that_the_template_refuses_makes_no_other_record_bad(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = [{"prompt": [USER], "completion": row["messages"][1:], "label": True} for row in GOOD]
    refused = {**good[0], "completion": [{"role": "assistant", "content": "REFUSED"}]}
    strict = copy.deepcopy(tokenizer)
    refuse = "{% for m in messages %}{% if 'REFUSED' in m['content'] %}{{ raise_exception('no') }}{% endif %}"
    strict.chat_template = f"{refuse}{{% endfor %}}{tokenizer.chat_template}"
    lines = [json.dumps(row) for row in (*good[:2], refused, *good[2:])]
    with pytest.raises(ConfigError, match=r"x\.jsonl:3: the chat template refuses"):
        prepare(tmp_path, lines, strict, "unpaired")
    prepared = prepare(tmp_path, lines, strict, "unpaired", on_bad_record="skip")
    [source] = prepared.audit.train.sources
    assert (source.samples, source.bad) == (6, 1)
    assert source.first_bad[0].startswith(f"{tmp_path}/x.jsonl:3: ")


def test_the_first_record_may_be_a_bad_one(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = ['{"note": "none of the formats"}', *map(json.dumps, GOOD)]
    prepared = prepare(tmp_path, lines, tokenizer, on_bad_record="skip")
    [source] = prepared.audit.train.sources
    assert (source.format, source.samples, source.bad) == ("messages", 6, 1)
    with pytest.raises(ConfigError, match=r"x\.jsonl:1: data\.format=auto does not recognise"):
        prepare(tmp_path, lines, tokenizer)


def test_a_field_of_columns_may_be_missing_in_the_first_record(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    lines = [json.dumps(GOOD[0]), json.dumps({**GOOD[1], "setting": "Be brief."})]
    prepared = prepare(tmp_path, lines, tokenizer, columns={"system": "setting"})
    assert prepared.audit.train.sources[0].samples == 2
    with pytest.raises(
        ConfigError, match=r"no record from here to .*:2 has a field 'topic'\.\nUse .*setting\.$"
    ):
        prepare(tmp_path, lines, tokenizer, columns={"system": "topic"})


def test_no_good_record(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"x.jsonl:1: malformed JSON"):
        prepare(tmp_path, ["{torn", "[1]"], tokenizer, on_bad_record="skip")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"no sample is left .* 2 that cannot be read"):
        prepare(other, [json.dumps(QUESTION)] * 2, tokenizer, on_bad_record="skip")
