"""Indexed data sets in Megatron's format are read as our own writer and Megatron's writer wrote them."""

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from components.contracts.errors import ConfigError
from components.data.store.indexed import IndexedTokens, indexed_prefix

CODES = {np.uint8: 1, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}
DOCUMENTS = [[5, 6, 7], [8], [1, 2, 3, 4, 9], [7, 7]]


def write_indexed(prefix: Path, documents: Sequence[Sequence[int]], kind: type = np.int32) -> Path:
    """Write PREFIX.bin and PREFIX.idx with one sequence per document."""
    arrays = [np.array(ids, kind) for ids in documents]
    Path(f"{prefix}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = [array.nbytes for array in arrays]
    pointers = [sum(sizes[:i]) for i in range(len(sizes))]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[kind], len(arrays), len(arrays) + 1)
    lengths = np.array([len(ids) for ids in documents], np.int32).tobytes()
    body = np.array(pointers, np.int64).tobytes() + np.arange(len(arrays) + 1, dtype=np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(head + lengths + body)
    return prefix


def check(store: IndexedTokens) -> None:
    assert store.lengths.tolist() == [len(ids) for ids in DOCUMENTS]
    for i, ids in enumerate(DOCUMENTS):
        assert store.tokens(i, 0, len(ids)).tolist() == ids
        assert store.tokens(i, 1, 99).tolist() == ids[1:]
        assert store.mask(i, 1, 99).tolist() == [True] * len(ids[1:])


@pytest.mark.parametrize("kind", CODES)
def test_reads_every_type_of_token(tmp_path: Path, kind: type) -> None:
    store = IndexedTokens.open(write_indexed(tmp_path / "corpus", DOCUMENTS, kind))
    assert store.tokens(0, 0, 1).dtype == kind
    check(store)


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_reads_what_megatron_wrote(tmp_path: Path, kind: type) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=kind)
    for ids in DOCUMENTS:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "corpus.idx"))
    check(IndexedTokens.open(tmp_path / "corpus"))


@pytest.mark.parametrize(
    ("drop", "kept", "truncated", "dropped"),
    [
        (False, [True, False, True, True], [False, False, True, False], 0),
        (True, [True, False, False, True], [False] * 4, 1),
    ],
)
def test_overlong_sequences(
    tmp_path: Path, drop: bool, kept: list[bool], truncated: list[bool], dropped: int
) -> None:
    store = IndexedTokens.open(write_indexed(tmp_path / "corpus", DOCUMENTS), max_length=3)
    outcome = store.outcome(drop=drop)
    assert store.lengths.tolist() == [3, 1, 3, 2]
    assert store.tokens(2, 0, 99).tolist() == [1, 2, 3]
    assert (outcome.kept.tolist(), outcome.truncated.tolist()) == (kept, truncated)
    assert outcome.left_out == Counter(dropped=dropped, unsupervised=1)
    assert outcome.num_supervised.tolist() == [2, 0, 2, 1]


def test_the_prefix_of_an_indexed_data_set(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "corpus.v1", DOCUMENTS)
    for path in (f"{prefix}.bin", f"{prefix}.idx", str(prefix)):
        assert indexed_prefix(path) == prefix
    (tmp_path / "a.jsonl").write_text("{}")
    for path in ("a.jsonl", "missing", "."):
        assert indexed_prefix(str(tmp_path / path)) is None


def overwrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "c.bin").unlink(), "c.bin: no such file"),
        (lambda p: (p / "c.idx").unlink(), "c.idx: no such file"),
        (lambda p: (p / "c.idx").write_bytes(b"MMID"), "is not an index"),
        (lambda p: overwrite(p / "c.idx", 0, b"X"), "is not an index"),
        (lambda p: overwrite(p / "c.idx", 9, b"\2"), "version 1"),
        (lambda p: overwrite(p / "c.idx", 17, b"\7"), "type code 7"),
        (lambda p: overwrite(p / "c.idx", 18, b"\0"), "holds no sequence"),
        (
            lambda p: (p / "c.idx").write_bytes((p / "c.idx").read_bytes()[:40]),
            "cut short of its 4 sequences",
        ),
        (lambda p: (p / "c.bin").write_bytes((p / "c.bin").read_bytes()[:-4]), "does not fit its .idx"),
        (lambda p: (p / "c.bin").write_bytes(b""), "c.bin: holds no token"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    write_indexed(tmp_path / "c", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        IndexedTokens.open(tmp_path / "c")
    assert str(tmp_path / "c") in str(error.value)


def test_a_path_that_may_not_be_entered_names_no_indexed_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)  # permission bits do not stop a test that runs as root
    assert indexed_prefix(str(tmp_path / "a.jsonl")) is None
    with pytest.raises(ConfigError, match=r"data\.eval=~nobody-at-all/c\.bin: there is no user"):
        indexed_prefix("~nobody-at-all/c.bin")


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    store = IndexedTokens.open(write_indexed(tmp_path / "c", DOCUMENTS))
    store.check_vocabulary(10)
    with pytest.raises(ConfigError, match=r"token 9, but the tokenizer's vocabulary is 9.*model.tokenizer"):
        store.check_vocabulary(9)
    negative = IndexedTokens.open(write_indexed(tmp_path / "d", [[1, -2]]))
    with pytest.raises(ConfigError, match="token -2"):
        negative.check_vocabulary(10)
