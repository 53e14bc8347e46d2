"""A stream: every record once a pass, batches that depend only on the step, and what ends a stream."""

import json
import logging
import multiprocessing
import os
import shutil
from contextlib import closing
from dataclasses import replace
from gzip import BadGzipFile
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from components.contracts.batch import DESIRABLE, UNDESIRABLE, Batch
from components.contracts.data import BatchShard
from components.contracts.errors import ConfigError, NonRetryableError, TrainingError
from components.data import FilesData
from components.data.store.checked_files import read_checked_json
from components.data.store.token_store import WorkerLost
from components.data.stream.chunks import chunk_name
from components.data.stream.producer import (
    FAILURE,
    Producer,
    StreamedTokens,
    _produce,
    requested_chunks,
    write_chunk,
    write_failure,
)
from components.data.stream.stream_loader import StreamLoader

SHARD = BatchShard(global_batch_size=8, micro_batch_size=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))


class InThisProcess(Producer):
    """A producer that writes a chunk when it is asked for one."""

    def start(self, first: int) -> None:
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            readers = range(len(self._reader.sources))
            parts = [StreamedTokens(self._reader, source, first, self._folder) for source in readers]
            self._chunks = iter(self._write(parts, number) for number in count(first))
            next(self._chunks)

    def _write(self, parts: Any, chunk: int) -> None:
        try:
            write_chunk(parts, self._folder / chunk_name(chunk), chunk)
        except ConfigError as error:
            write_failure(self._folder, error)

    def request(self) -> None:
        if not (self._folder / FAILURE).exists():
            next(self._chunks)

    def check(self) -> None: ...


class Late(InThisProcess):
    """A producer whose first chunk the loader has to wait for."""

    def start(self, first: int) -> None:
        self._first = first

    def check(self) -> None:
        super().start(self._first)


class Opened:
    """A stream of ``data`` and the loaders of it."""

    def __init__(
        self, data: FilesData, folder: Path, tokenizer: PreTrainedTokenizerBase, kind: Any = "text"
    ) -> None:
        found = data.prepare(kind, tokenizer, seed=3, global_batch_size=8, max_steps=40, epochs=None)
        self.data, self.folder, self.tokenizer, self.kind = data, folder, tokenizer, kind
        self.prepared, self.json = found, json.loads(json.dumps(found.to_json()))
        self.buffer_size = data.buffer_size or 0
        self.beats: list[int] = []

    def loader(
        self,
        shard: BatchShard = SHARD,
        *,
        step: int = 0,
        position: Any = (),
        make: type[Producer] | None = InThisProcess,
    ) -> StreamLoader:
        options: dict[str, Any] = {"step": step, "position": position, "main": make is not None}
        options["beat"] = lambda: self.beats.append(step)
        with mock.patch("components.data.config.Producer", make):
            return self.data.open_stream(self.json, shard, self.kind, self.tokenizer, self.folder, **options)


def write_texts(path: Path, number: int, word: str = "word") -> Path:
    path.write_text("\n".join(json.dumps({"text": f"{word} {i} " + "x " * (i % 7)}) for i in range(number)))
    return path


@pytest.fixture(params=[5, 64])
def opened(request: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Opened:
    """50 documents in chunks of as many records, so that batches have rows of several chunks or of one."""
    texts = write_texts(tmp_path / "texts.jsonl", 50)
    data = FilesData(train=str(texts), streaming=True, buffer_size=request.param, packing="none")
    return Opened(data, tmp_path / "stream", tokenizer)


def texts(batches: list[Batch], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [
        tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
        for batch in batches
        for ids, length in zip(batch.input_ids, (batch.position_ids > 0).sum(1) + 1, strict=True)
    ]


def same(one: list[Batch], other: list[Batch]) -> bool:
    names = ("input_ids", "sequence_keys")
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)


def test_every_record_comes_once_a_pass(opened: Opened, tokenizer: PreTrainedTokenizerBase) -> None:
    with closing(opened.loader()) as loader:
        read = [text for step in range(20) for text in texts(loader.microbatches(step), tokenizer)]
    assert len(read) == 20 * 8
    whole = 150 // opened.buffer_size * opened.buffer_size
    times = [read[:whole].count(text) for text in set(read)]
    assert len(times) == 50
    assert {whole // 50, -(-whole // 50)} >= set(times)
    assert read[:20] != sorted(read[:20], key=lambda text: int(text.split()[1]))  # chunks are shuffled


def test_a_chunk_has_both_answers_of_its_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path, pair = tmp_path / "pairs.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}
    path.write_text("\n".join([json.dumps(pair)] * 12))
    data = FilesData(train=str(path), streaming=True, buffer_size=4, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer, "unpaired")
    [audited] = opened.prepared.audit.train.sources
    assert audited.samples == 8
    with closing(opened.loader()) as loader:
        for step in range(6):  # every chunk is one batch
            records = [1 + 4 * step + i for i in range(4)]
            assert sorted(loader.sample_ids(step)) == sorted(f"data.train:{n}" for n in records * 2)
            labels = [batch.sequence_labels.tolist()[::2] for batch in loader.microbatches(step)]
            assert sorted(chain(*labels)) == [UNDESIRABLE] * 4 + [DESIRABLE] * 4


def test_a_loader_continues_at_any_position(opened: Opened, tmp_path: Path) -> None:
    with closing(opened.loader()) as loader:
        batches, positions = {}, {}
        for step in range(12):
            batches[step] = loader.microbatches(step)
            positions[step + 1] = loader.advance(step + 1)
    for step in (1, 7, 11):
        with closing(opened.loader(step=step, position=positions[step])) as loader:
            assert loader.advance(step) == positions[step]
            for later in range(step, 12):
                assert same(loader.microbatches(later), batches[later])


def test_skipping_the_used_records_is_progress(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the watchdog would end a run that resumes a long stream."""
    monkeypatch.setattr("components.data.stream.producer.EVERY_S", 0.0)
    with caplog.at_level(logging.INFO), closing(opened.loader(step=3, position=(5, 0), make=Late)) as loader:
        loader.microbatches(3)
    assert opened.beats == [3]
    number = 5 * opened.buffer_size % 50
    assert f"data.train: skipped {number} of {number} records that earlier steps used" in caplog.messages


def test_a_sequence_has_another_number_in_every_step(opened: Opened) -> None:
    """The chunks of a stream number their sequences anew."""
    with closing(opened.loader()) as loader:
        batches = [batch for step in range(20) for batch in loader.microbatches(step)]
    found = torch.cat([batch.sequence_keys for batch in batches if batch.sequence_keys is not None])
    assert len(found.unique()) == len(found) == 20 * 8


def test_ranks_divide_each_batch(opened: Opened) -> None:
    """Rank 0 makes the chunks, and the other one reads them."""
    with closing(opened.loader()) as whole:
        expected = [whole.microbatches(step) for step in range(9)]
        stats = [whole.stats(step) for step in range(9)]
    ranks = [replace(SHARD, dp_rank=rank, dp_size=2) for rank in range(2)]
    with closing(opened.loader(ranks[0])) as first, closing(opened.loader(ranks[1], make=None)) as second:
        for step in range(9):
            both = [first.microbatches(step), second.microbatches(step)]
            merged = [batch for pair in zip(*both, strict=True) for batch in pair]
            assert same(merged, expected[step])
            assert first.stats(step) == second.stats(step) == stats[step]
            assert first.sample_ids(step) == second.sample_ids(step)


def test_chunks_of_the_past_are_deleted(opened: Opened) -> None:
    with closing(opened.loader()) as loader:
        for step in range(30):
            loader.microbatches(step)
            chunk, _ = loader.advance(step + 1)
        oldest = min(int(path.name.split("_")[1]) for path in opened.folder.glob("chunk_*"))
        assert oldest >= chunk - 3 * 8 // opened.buffer_size - 1
        assert chunk >= 3
        loader.microbatches(29)  # the step that another rank may be at
    assert not opened.folder.exists()


def test_a_sample_is_named_by_its_record(opened: Opened, tokenizer: PreTrainedTokenizerBase) -> None:
    with closing(opened.loader()) as loader:
        for step in range(12):
            read = texts(loader.microbatches(step), tokenizer)
            records = [int(name.removeprefix("data.train:")) for name in loader.sample_ids(step)]
            assert [(record - 1) % 50 for record in records] == [int(text.split()[1]) for text in read]


@pytest.mark.parametrize("chunk", range(6))
def test_the_largest_microbatch_is_of_the_first_chunk(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, chunk: int
) -> None:
    """Rows of the chunk after its last whole batch, which may be longer, are in no step of it."""
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": "x " * (1 + i)}) for i in range(50)))
    data = FilesData(train=str(path), streaming=True, buffer_size=23, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer)
    with closing(opened.loader(step=2, position=(chunk, 0))) as loader:
        step, index = loader.largest_microbatch()
        found = loader.microbatches(step)[index].input_ids.shape[1]
        steps = range(2, 2 + 23 // 8)
        assert step in steps
        assert found == max(batch.input_ids.shape[1] for at in steps for batch in loader.microbatches(at))


def test_every_chunk_is_mixed_by_the_shares(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    paths = [write_texts(tmp_path / f"{word}.jsonl", 9, word) for word in ("common", "rare")]
    data = FilesData(sources=f"3 {paths[0]} 1 {paths[1]}", streaming=True, buffer_size=18, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer)
    with closing(opened.loader()) as loader:
        read = [text for step in range(9) for text in texts(loader.microbatches(step), tokenizer)]
    words = [text.split()[0] for text in read]
    for start, stop, rare in ((0, 17, 4), (17, 36, 5), (36, 53, 4), (53, 72, 5)):  # 18 and 4.5 on average
        assert words[start:stop].count("rare") == rare
    assert [source.name.rpartition(", ")[2] for source in opened.prepared.audit.train.sources] == [
        "its first 13 records",
        "its first 4 records",
    ]


@pytest.mark.parametrize("kind", ["preference", "unpaired"])
def test_pairs(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    answers = {
        "preference": {"chosen": "yes", "rejected": "no"},
        "unpaired": {"completion": "yes", "label": 1},
    }
    lines = [json.dumps({"prompt": f"question {i}", **answers[kind]}) for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines).replace('"label": 1', '"label": true'))
    data = FilesData(
        train=str(tmp_path / "pairs.jsonl"),
        streaming=True,
        buffer_size=10,
        share_prompt=kind == "preference",
    )
    opened = Opened(data, tmp_path / "stream", tokenizer, kind)
    with closing(opened.loader()) as loader:
        for step in range(3):
            assert loader.stats(step).num_samples > 0
            assert loader.stats(step).num_samples == len(loader.sample_ids(step))
            for batch in loader.microbatches(step):
                assert (batch.prefix_lengths is not None) == (kind == "preference")


# ---- the end of a stream


def with_a_bad_record(folder: Path, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Opened:
    path = write_texts(folder / "texts.jsonl", 50)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:30], "{", *lines[30:]]))
    data = FilesData(train=str(path), streaming=True, buffer_size=10, packing="none", **options)
    return Opened(data, folder / "stream", tokenizer)


def test_a_bad_record_ends_the_run_when_it_is_read(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    loader = with_a_bad_record(tmp_path, tokenizer).loader()
    with closing(loader):
        assert len([loader.microbatches(step) for step in range(3)]) == 3
        with pytest.raises(NonRetryableError, match=r"texts.jsonl:31: malformed JSON"):
            loader.microbatches(3)


def test_or_is_named_and_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    loader = with_a_bad_record(tmp_path, tokenizer, on_bad_record="skip").loader()
    with closing(loader), caplog.at_level(logging.WARNING):
        for step in range(4):
            loader.microbatches(step)
    assert [record.message for record in caplog.records if "texts.jsonl:31" in record.message]
    listed = (tmp_path / "bad_records.jsonl").read_text().splitlines()
    assert [json.loads(line)["origin"].rpartition("/")[2] for line in listed] == ["texts.jsonl:31"]


def test_also_where_its_source_has_no_sample_in_a_chunk(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts, torn = write_texts(tmp_path / "texts.jsonl", 50), tmp_path / "torn.jsonl"
    torn.write_text('{"text": "a"}\n{\n')
    data = FilesData(
        sources=f"9 {texts} 1 {torn}",
        streaming=True,
        buffer_size=10,
        packing="none",
        on_bad_record="skip",
    )
    with closing(Opened(data, tmp_path / "stream", tokenizer).loader()) as loader:
        loader.microbatches(1)
    assert "torn.jsonl:2" in (tmp_path / "bad_records.jsonl").read_text()


def test_no_bad_record_is_no_file(opened: Opened) -> None:
    with closing(opened.loader()) as loader:
        loader.microbatches(0)
    assert not (opened.folder.parent / "bad_records.jsonl").exists()


def test_its_identity_follows_its_limit_and_its_first_chunk(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_texts(tmp_path / "texts.jsonl", 50)

    def identity(path: Path = path, **options: Any) -> str:
        data = FilesData(train=str(path), streaming=True, buffer_size=10, packing="none", **options)
        return Opened(data, tmp_path / "stream", tokenizer).prepared.identity

    found = identity()
    assert found == identity() != identity(max_samples=30)
    assert found == identity(on_bad_record="skip")  # a remedy for a bad record later in the stream
    moved = Path(shutil.copy2(path, tmp_path / "moved.jsonl"))
    assert found == identity(moved)
    other = tmp_path / "other.jsonl"  # of the same size and time
    other.write_text(path.read_text().replace("word", "ward"))
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    assert found != identity(other)
    path.write_text(path.read_text().replace("word", "sword", 1).replace("word", "wor", 1))
    os.utime(path, (0, 0))
    assert found != identity()


def test_a_process_makes_the_same_chunks(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 50)
    data = FilesData(train=str(texts), streaming=True, buffer_size=10, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer)
    with closing(opened.loader()) as loader:
        expected = [loader.microbatches(step) for step in range(4)]
    with closing(opened.loader(make=Producer)) as loader:
        assert all(same(loader.microbatches(step), expected[step]) for step in range(4))
        [process] = [child for child in multiprocessing.active_children() if child.name == "stream"]
    assert process.exitcode == 0  # not killed, which would leave the semaphores of its workers
    assert not opened.folder.exists()


def test_a_process_that_dies_ends_the_run(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 50)
    data = FilesData(train=str(texts), streaming=True, buffer_size=10, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer)
    loader = opened.loader(make=Producer)
    other = opened.loader(make=None)
    with closing(loader):
        loader.microbatches(0)
        [process] = [child for child in multiprocessing.active_children() if child.name == "stream"]
        process.kill()
        process.join()
        with pytest.raises(TrainingError, match=r"data.streaming: the process that reads ahead has died"):
            [loader.microbatches(step) for step in range(40)]
        with pytest.raises(TrainingError, match=r"the process that reads ahead has died"):
            [other.microbatches(step) for step in range(40)]


def test_closing_ends_the_process_also_after_an_interrupt(tmp_path: Path) -> None:
    with mock.patch("components.data.stream.producer.multiprocessing.get_context") as spawn:
        process = spawn.return_value.Process.return_value
        process.join.side_effect = [KeyboardInterrupt, None]
        spawn.return_value.Pipe.return_value = mock.Mock(), mock.Mock()
        producer = Producer(mock.Mock(), tmp_path / "stream")
        producer.start(0)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    process.kill.assert_called_once()
    assert not (tmp_path / "stream").exists()


def test_no_chunk_is_made_for_a_request_after_the_connection_is_closed() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    chunks = requested_chunks(receiver, 3)
    for _ in range(3):
        sender.send(None)
    assert [next(chunks), next(chunks)] == [3, 4]
    sender.close()
    assert list(chunks) == []


class Broken:
    """A source with a mistake in its code."""

    def items(self, _: object) -> None:
        raise ZeroDivisionError("division by zero")


def test_a_mistake_in_code_ends_the_run(tmp_path: Path) -> None:
    _, ours = multiprocessing.Pipe(duplex=False)
    reader = mock.Mock(sources=[Broken()])
    with (
        mock.patch.multiple(
            "components.data.stream.producer", end_with_parent=mock.DEFAULT, signal=mock.DEFAULT
        ),
        pytest.raises(ZeroDivisionError),  # for the traceback
    ):
        _produce(reader, tmp_path, 0, ours)
    failure = read_checked_json(tmp_path / FAILURE)
    assert failure["final"]
    assert failure["reason"].startswith("data.streaming: ZeroDivisionError('division by zero');")


def cannot_be_read(cause: OSError) -> ConfigError:
    error = ConfigError("a.jsonl: cannot be read")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("a.jsonl:3: malformed JSON"), NonRetryableError),
        (cannot_be_read(OSError(5, "Input/output error")), TrainingError),
        (cannot_be_read(OSError("zlib inflate failed: incorrect data check")), NonRetryableError),
        (cannot_be_read(ConnectionError("Couldn't reach the hub")), TrainingError),
        (FileNotFoundError(2, "No such file or directory"), NonRetryableError),
        (PermissionError(13, "Permission denied"), NonRetryableError),
        (BadGzipFile("Not a gzipped file"), NonRetryableError),
        (OSError(28, "No space left on device"), TrainingError),
        (WorkerLost("data.num_workers: a tokenising process died"), TrainingError),
    ],
)
def test_a_failure_that_may_pass_is_restarted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, error: Exception, kind: type[Exception]
) -> None:
    texts = write_texts(tmp_path / "texts.jsonl", 50)
    data = FilesData(train=str(texts), streaming=True, buffer_size=10, packing="none")
    opened = Opened(data, tmp_path / "stream", tokenizer)
    opened.folder.mkdir()
    write_failure(opened.folder, error)
    with pytest.raises(TrainingError) as caught:
        opened.loader(make=None).microbatches(0)
    assert caught.type is kind
    assert str(caught.value) == str(error)


def test_a_chunk_without_a_sample(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lines = [{"text": "a b c"}] * 20 + [{"text": "a b c " * 99}] * 20
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options: dict[str, Any] = {"packing": "none", "max_length": 50, "long_samples": "drop"}
    data = FilesData(train=str(tmp_path / "texts.jsonl"), streaming=True, buffer_size=10, **options)
    loader = Opened(data, tmp_path / "stream", tokenizer).loader()
    with (
        closing(loader),
        pytest.raises(NonRetryableError, match="no record of chunk 2 can be trained on; raise"),
    ):
        [loader.microbatches(step) for step in range(9)]


def test_closing_ends_the_wait_for_a_chunk(opened: Opened) -> None:
    loader = opened.loader(make=None)
    loader.close()
    with pytest.raises(NonRetryableError, match="was closed"):
        loader.microbatches(0)
