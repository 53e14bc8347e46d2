"""Token stores return the written sequences, and an incomplete store is never opened."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from components.contracts.errors import ConfigError
from components.data.store import digests
from components.data.store import token_store as store_module
from components.data.store.checked_files import read_checked_json, write_checked_json
from components.data.store.concat_store import ConcatTokens
from components.data.store.digests import file_digest
from components.data.store.token_sequences import Array
from components.data.store.token_store import (
    CorruptTokenStore,
    StoreWriter,
    TokenChunk,
    TokenStore,
    WorkerLost,
)


def make_chunk(
    sequences: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], per_sample: int = 1
) -> TokenChunk:
    samples = len(sequences) // per_sample
    return TokenChunk(
        tokens=np.array([token for ids in sequences for token in ids], np.uint32),
        mask=np.array([one for mask in masks for one in mask], np.bool_),
        lengths=np.array([len(ids) for ids in sequences], np.int64),
        truncated=np.zeros(samples, np.bool_),
        stop_trained=np.ones(samples, np.bool_),
        records=np.arange(samples),
        left_out=Counter(),
    )


def make_store(
    path: Path,
    sequences: Sequence[Sequence[int]],
    masks: Sequence[Sequence[int]] | None = None,
    *,
    per_sample: int = 1,
    vocab_size: int = 1000,
) -> TokenStore:
    """Return a store written in chunks of two samples; without masks, every token is a target."""
    every = masks or [[1] * len(ids) for ids in sequences]
    writer = StoreWriter(
        path, vocab_size=vocab_size, sequences_per_sample=per_sample, masked=masks is not None, format="text"
    )
    with writer:
        for i in range(0, len(sequences), 2 * per_sample):
            part = slice(i, i + 2 * per_sample)
            writer.append(make_chunk(sequences[part], every[part], per_sample))
    return TokenStore.open(path)


SEQUENCES = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
MASKS = [[1, 0, 1], [1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("masks", [None, MASKS])
@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(1000, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)]
)
def test_reads_what_was_written(
    tmp_path: Path, masks: list[list[int]] | None, vocab_size: int, kind: type
) -> None:
    store = make_store(tmp_path / "s", SEQUENCES, masks, vocab_size=vocab_size)
    assert store.lengths.tolist() == [3, 2, 4]
    for i, ids in enumerate(SEQUENCES):
        wanted = masks[i] if masks else [1] * len(ids)
        assert store.tokens(i, 0, len(ids)).tolist() == ids
        assert store.tokens(i, 0, 1).dtype == kind
        assert store.mask(i, 0, len(ids)).tolist() == [bool(one) for one in wanted]
        assert store.outcome().num_supervised[i] == sum(wanted[1:])


@pytest.mark.parametrize("span", [(0, 2), (1, 3), (2, 99), (3, 5), (0, 0)])
def test_a_span_ends_with_its_sequence(tmp_path: Path, span: tuple[int, int]) -> None:
    store = make_store(tmp_path / "s", SEQUENCES, MASKS)
    assert store.tokens(0, *span).tolist() == SEQUENCES[0][slice(*span)]
    assert store.mask(0, *span).tolist() == [bool(one) for one in MASKS[0][slice(*span)]]


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_tokens(path: Path) -> None:
    (path / "tokens").write_bytes((path / "tokens").read_bytes()[:-1])


def forget_a_key(path: Path) -> None:
    meta = read_checked_json(path / "meta.json")
    write_checked_json(path / "meta.json", {k: v for k, v in meta.items() if k != "masked"})


@pytest.mark.parametrize(
    "damage",
    [
        cut_tokens,
        forget_a_key,
        lambda path: (path / "offsets").unlink(),
        lambda path: (path / "meta.json").unlink(),
        lambda path: (path / "meta.json").write_text("{"),
        lambda path: (path / "meta.json").write_text("[]"),
    ],
)
def test_a_torn_store_is_not_opened_and_can_be_written_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(make_store(tmp_path / "s", SEQUENCES).path)
    with pytest.raises(CorruptTokenStore):
        TokenStore.open(tmp_path / "s")
    assert make_store(tmp_path / "s", SEQUENCES[:1]).lengths.tolist() == [3]


def write_parts(path: Path, parts: Sequence[int], error: BaseException | None = None) -> int:
    """Append samples of ``SEQUENCES`` after those that are there; return how many there were."""
    writer = StoreWriter(path, vocab_size=10, sequences_per_sample=1, masked=True, format="text")
    with writer:
        there = writer.meta.records
        for number in parts[there:]:
            writer.append(make_chunk([SEQUENCES[number]], [MASKS[number]]))
        assert not path.exists()
        if error is not None:
            raise error
    return there


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def cannot_be_read() -> ConfigError:
    error = ConfigError("a.jsonl: cannot be read")
    error.__cause__ = OSError(5, "Input/output error")
    return error


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), WorkerLost("data.num_workers: ..."), OSError(28, "full"), cannot_be_read()],
)
def test_the_next_writer_continues_after_an_interrupt(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write_parts(tmp_path / "s", [0, 1], error)
    assert not (tmp_path / "s").exists()
    assert write_parts(tmp_path / "s", [0, 1, 2]) == 2
    write_parts(tmp_path / "straight", [0, 1, 2])
    assert contents(tmp_path / "s") == contents(tmp_path / "straight")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "straight"]


def test_an_interrupt_within_a_chunk_keeps_only_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes after some of the files of a chunk are written."""
    write = StoreWriter._write

    def interrupted(writer: StoreWriter, name: str, values: Array) -> None:
        write(writer, name, values)
        if name == "tokens" and writer.meta.records == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("components.data.store.token_store._SAVE_S", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_parts(tmp_path / "s", [0, 1, 2])
    assert write_parts(tmp_path / "s", [0, 1, 2]) == 1
    write_parts(tmp_path / "straight", [0, 1, 2])
    assert contents(tmp_path / "s") == contents(tmp_path / "straight")


def test_nothing_is_left_after_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_parts(tmp_path / "s", [0, 1], ConfigError("data.train: ..."))
    assert list(tmp_path.iterdir()) == []


def test_a_kill_costs_only_what_came_after_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is never left, as after a kill, in the middle of a further write."""
    monkeypatch.setattr(store_module, "_SAVE_S", 0.0)
    writer = StoreWriter(tmp_path / "s", vocab_size=10, sequences_per_sample=1, masked=True, format="text")
    killed = writer.__enter__()
    killed.append(make_chunk([SEQUENCES[0]], [MASKS[0]]))
    with (tmp_path / "s.partial" / "tokens").open("ab") as file:
        file.write(b"half a sam")
    assert write_parts(tmp_path / "s", [0, 1, 2]) == 1
    write_parts(tmp_path / "straight", [0, 1, 2])
    assert contents(tmp_path / "s") == contents(tmp_path / "straight")


@pytest.mark.parametrize("damage", [flip, empty, Path.unlink])
@pytest.mark.parametrize("name", ["tokens", "offsets", "records", "progress.json"])
def test_a_damaged_rest_is_written_from_its_beginning(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_parts(tmp_path / "s", [0, 1], KeyboardInterrupt())
    damage(tmp_path / "s.partial" / name)
    assert write_parts(tmp_path / "s", [0, 1, 2]) == 0
    write_parts(tmp_path / "straight", [0, 1, 2])
    assert contents(tmp_path / "s") == contents(tmp_path / "straight")


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="vocabulary"):
        make_store(tmp_path / "s", [[5, 9]], vocab_size=9)


def test_joined_stores_read_as_one(tmp_path: Path) -> None:
    parts = [
        make_store(tmp_path / str(i), [ids], [mask])
        for i, (ids, mask) in enumerate(zip(SEQUENCES, MASKS, strict=True))
    ]
    joined = ConcatTokens([parts[0], parts[1], parts[2]])
    assert joined.lengths.tolist() == [3, 2, 4]
    for i, (ids, mask) in enumerate(zip(SEQUENCES, MASKS, strict=True)):
        assert joined.tokens(i, 0, 9).tolist() == ids
        assert joined.mask(i, 0, 9).tolist() == [bool(one) for one in mask]


def test_the_digest_of_a_large_file_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("one")
    small = file_digest(path, cache)
    assert not cache.exists()
    monkeypatch.setattr(digests, "_MEMO_BYTES", 1)
    assert file_digest(path, cache) == small
    monkeypatch.setattr(digests.hashlib, "file_digest", None)  # must not be called again
    assert file_digest(path, cache) == small
    monkeypatch.undo()
    path.write_text("another")
    assert file_digest(path, cache) != small
