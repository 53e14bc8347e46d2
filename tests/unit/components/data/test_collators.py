"""The conversion of rows to batches: shifted labels, sequence boundaries and empty rows."""

from pathlib import Path

import numpy as np
import pytest
import torch

from components.contracts.batch import IGNORE
from components.data.collators import collate_packed, collate_padded, read_segment
from components.data.packing import PlanOptions, plan_epoch
from components.data.store.token_store import TokenStore
from tests.unit.components.data.store.test_token_store import make_store

PAD = 0
SEQUENCES = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [11, 12, 13]]
MASKS = [[0, 0, 1], [1, 1], [0, 1, 0, 1], [1, 1, 1]]
LABELS = [[IGNORE, 7, IGNORE], [9, IGNORE], [2, IGNORE, 4, IGNORE], [12, 13, IGNORE]]
EMPTY = np.empty((0, 3), np.int64)


def whole(*sequences: int) -> np.ndarray:
    return np.array([[i, 0, len(SEQUENCES[i])] for i in sequences], np.int64)


@pytest.fixture(params=[1, 2])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TokenStore:
    return make_store(tmp_path / "s", SEQUENCES, MASKS, per_sample=request.param)


def test_packed(store: TokenStore) -> None:
    rows = [whole(2, 3), EMPTY, whole(0, 1)]
    batch = collate_packed(store, rows, PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 11, 12, 13, 5, 6, 7, 8, 9]]
    assert batch.labels.tolist() == [[*LABELS[2], *LABELS[3], *LABELS[0], *LABELS[1]]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.seqlens.tolist() == [4, 3, 3, 2]
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 7, 10, 12]
    assert (batch.cu_seqlens.dtype, batch.seqlens.dtype, batch.labels.dtype) == (
        torch.int32,
        torch.int32,
        torch.int64,
    )
    assert (batch.max_seqlen, type(batch.max_seqlen)) == (4, int)
    pairs = None if batch.pair_index is None else batch.pair_index.tolist()
    assert pairs == (None if store.sequences_per_sample == 1 else [0, 1, 2, 3])


def test_padded(store: TokenStore) -> None:
    per = store.sequences_per_sample
    batch = collate_padded(store, [whole(2, 3)[:per], EMPTY], PAD)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [11, 12, 13, PAD]][:per] + [[PAD] * 4] * per
    assert batch.labels.tolist() == [LABELS[2], [*LABELS[3], IGNORE]][:per] + [[IGNORE] * 4] * per
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2 * per
    assert batch.seqlens.tolist() == [4, 3][:per] + [0] * per
    assert batch.cu_seqlens is None
    assert batch.max_seqlen is None
    pairs = None if batch.pair_index is None else batch.pair_index.tolist()
    assert pairs == (None if per == 1 else [0, 1, -1, -1])


def test_empty_batches(store: TokenStore) -> None:
    per = store.sequences_per_sample
    packed, padded = (collate(store, [EMPTY, EMPTY], PAD) for collate in (collate_packed, collate_padded))
    assert packed.input_ids.tolist() == [[PAD]]
    assert packed.cu_seqlens is not None
    assert (packed.cu_seqlens.tolist(), packed.seqlens.tolist(), packed.max_seqlen) == ([0, 1], [0], 1)
    assert padded.input_ids.tolist() == [[PAD]] * 2 * per
    assert padded.seqlens.tolist() == [0] * 2 * per
    for batch in (packed, padded):
        assert (batch.labels == IGNORE).all()
        assert (batch.position_ids == 0).all()
        assert batch.sum_per_sequence(torch.ones_like(batch.labels)).numel() == batch.num_sequences
        assert (batch.pair_index is None) == (per == 1)
        assert batch.pair_index is None or (batch.pair_index == -1).all()


def test_a_pair_in_the_wrong_order_is_caught(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", SEQUENCES, MASKS, per_sample=2)
    with pytest.raises(AssertionError, match="chosen comes first"):
        collate_packed(store, [whole(1, 0)], PAD)


@pytest.mark.parametrize(
    ("segment", "ids", "labels"),
    [
        ([2, 0, 4], [1, 2, 3, 4], [2, IGNORE, 4, IGNORE]),
        ([2, 0, 3], [1, 2, 3], [2, IGNORE, 4]),
        ([2, 2, 3], [3], [4]),
        ([2, 3, 4], [4], [IGNORE]),
    ],
)
def test_a_cut_document_predicts_the_token_after_the_cut(
    store: TokenStore, segment: list[int], ids: list[int], labels: list[int]
) -> None:
    got = read_segment(store, segment)
    assert (got[0].tolist(), got[1].tolist()) == (ids, labels)


@pytest.mark.parametrize("max_length", [2, 3, 5, 100])
def test_concat_trains_on_every_target_once(tmp_path: Path, max_length: int) -> None:
    """Every token except the first of its document is a label once; all tokens are distinct here."""
    documents = [list(range(10 * i, 10 * i + length)) for i, length in enumerate([2, 9, 3, 10, 7])]
    store = make_store(tmp_path / "s", documents)
    plan = plan_epoch(store.lengths, PlanOptions("concat", max_length, shuffle=True), epoch=0)
    seen = []
    for row in range(plan.num_rows):
        batch = collate_packed(store, [plan.row(row)], PAD)
        trained = batch.labels != IGNORE
        assert (batch.labels[trained] == batch.input_ids[trained] + 1).all()
        seen += batch.labels[trained].tolist()
    assert sorted(seen) == sorted(token for ids in documents for token in ids[1:])


def test_packed_and_padded_hold_the_same_sequences(store: TokenStore) -> None:
    per = store.sequences_per_sample
    rows = [whole(*range(i, i + per)) for i in range(0, 4, per)]
    packed, padded = collate_packed(store, rows, PAD), collate_padded(store, rows, PAD)
    real = torch.arange(padded.labels.shape[1]) < padded.seqlens[:, None]
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(getattr(padded, name)[real], getattr(packed, name)[0])
