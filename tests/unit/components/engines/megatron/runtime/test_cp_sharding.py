"""Context-parallel ranks hold every token exactly once, and padding does not contribute.

test_core_attention.py checks against megatron-core itself that the split is the zig-zag it expects.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.engines.megatron.runtime.attention_spans import full_spans, ring_spans
from components.engines.megatron.runtime.cp_sharding import (
    CPShard,
    aligned_length,
    gather_shards,
    shard_batch,
)

CPU = torch.device("cpu")
LAYOUTS = [(1, 1), (1, 8), (2, 1), (2, 8), (3, 6), (4, 16)]
"""(cp, multiple)"""


def lengths(seed: int) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 7, (), generator=g))
    return torch.randint(1, 30, (count,), generator=g).tolist()


def packed(lengths: list[int]) -> Batch:
    """Return a packed batch of distinct tokens, so that a token identifies its place."""
    spans = torch.tensor(lengths, dtype=torch.int32)
    ids = torch.arange(1, sum(lengths) + 1)[None]
    return Batch(
        input_ids=ids,
        labels=ids + 1000,
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        seqlens=spans,
        cu_seqlens=F.pad(spans.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=max(lengths),
    )


def padded(lengths: list[int]) -> Batch:
    longest = max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, real.numel() + 1).view_as(real)
    return Batch(
        input_ids=ids.where(real, 0),
        labels=(ids + 1000).where(real, IGNORE),
        position_ids=torch.arange(longest).expand_as(real),
        seqlens=torch.tensor(lengths, dtype=torch.int32),
    )


def empty() -> Batch:
    one = torch.zeros(1, 1, dtype=torch.int64)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return Batch(one, one + IGNORE, one, ends[:1], cu_seqlens=ends, max_seqlen=1)


def rows(batch: Batch, cp: int, multiple: int, **options: Any) -> list[CPShard]:
    return [shard_batch(batch, cp=cp, rank=rank, multiple=multiple, **options) for rank in range(cp)]


@pytest.mark.parametrize("layout", [packed, padded])
@pytest.mark.parametrize(("cp", "multiple"), LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_on_one_rank_with_its_label_and_position(
    layout: Any, cp: int, multiple: int, seed: int
) -> None:
    batch = layout(lengths(seed))
    shares = rows(batch, cp, multiple)
    held = torch.cat(
        [torch.stack([r.input_ids, r.labels, r.position_ids], -1).flatten(0, 1) for r in shares]
    ).tolist()
    real = torch.stack([batch.input_ids, batch.labels, batch.position_ids], -1).flatten(0, 1)
    expected = real[real[:, 1] != IGNORE].tolist()
    assert sorted(row for row in held if row[1] != IGNORE) == sorted(expected)
    assert all(token == 0 for token, label, _ in held if label == IGNORE)


@pytest.mark.parametrize("layout", [packed, padded])
@pytest.mark.parametrize(("cp", "multiple"), LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_shares_are_equal_and_as_long_as_asked(layout: Any, cp: int, multiple: int, seed: int) -> None:
    batch = layout(lengths(seed))
    length = aligned_length(batch, cp=cp, multiple=multiple)
    for longer in (0, 2 * cp * multiple):
        shares = rows(batch, cp, multiple, length=length + longer)
        assert {row.input_ids.shape for row in shares} == {(len(batch.labels), (length + longer) // cp)}
        if batch.cu_seqlens is None:
            assert all(row.cu_seqlens is None and row.max_seqlen is None for row in shares)
            continue
        for row in shares:
            assert row.cu_seqlens is not None
            assert row.cu_seqlens.dtype == torch.int32
            assert row.cu_seqlens[-1] == length + longer
            assert row.max_seqlen == row.cu_seqlens.diff().max()
            assert cp == 1 or not (row.cu_seqlens % (2 * cp)).any()


@pytest.mark.parametrize(("cp", "multiple"), LAYOUTS)
def test_a_sequence_of_the_aligned_row_is_one_of_the_batch_and_then_padding(cp: int, multiple: int) -> None:
    batch = packed(lengths(3))
    shares = rows(
        batch, cp, multiple, length=aligned_length(batch, cp=cp, multiple=multiple) + 4 * multiple * cp
    )
    ends = shares[0].cu_seqlens
    assert ends is not None
    joined = torch.cat([row.input_ids for row in shares], 1)[0]
    order = full_spans(tuple(ends.tolist()), cp, CPU).order
    assert len(order) == (len(joined) if cp > 1 else 0)  # nothing is stored for rows that are not split
    natural = joined[order] if cp > 1 else joined
    spans = natural.split(ends.diff().tolist())
    sequences = batch.input_ids[0].split(batch.seqlens.tolist())
    for span, sequence in zip(spans, [*sequences, natural[:0]], strict=True):
        assert torch.equal(span, F.pad(sequence, (0, len(span) - len(sequence))))


@pytest.mark.parametrize("layout", [packed, padded])
@pytest.mark.parametrize(("cp", "multiple"), LAYOUTS)
def test_what_was_scattered_is_found_at_index(layout: Any, cp: int, multiple: int) -> None:
    batch = layout(lengths(1))
    values = torch.randn(batch.labels.shape, dtype=torch.float64)
    shares = rows(batch, cp, multiple)
    joined = torch.cat([row.scatter(values) for row in shares], 1)
    for row in shares:
        assert torch.equal(joined.gather(1, row.index), values)
    assert torch.isclose(joined.sum(), values.sum())
    assert torch.equal(torch.cat([r.scatter(batch.labels, IGNORE) for r in shares], 1), joined_labels(shares))


def joined_labels(shares: list[CPShard]) -> Tensor:
    return torch.cat([row.labels for row in shares], 1)


@pytest.mark.parametrize("layout", [packed, padded])
def test_one_rank_without_alignment_holds_the_batch_as_it_is(layout: Any) -> None:
    batch = layout([5, 3, 9])
    row = shard_batch(batch, cp=1, rank=0, multiple=1)
    for name in ("input_ids", "labels"):
        assert torch.equal(getattr(row, name), getattr(batch, name))
    values = torch.randn(batch.labels.shape)
    assert torch.equal(gather_shards(values, row, None), values)


@pytest.mark.parametrize(("cp", "multiple"), LAYOUTS)
def test_an_empty_microbatch_is_padding_alone(cp: int, multiple: int) -> None:
    for row in rows(empty(), cp, multiple, length=8 * cp * multiple):
        assert (row.labels == IGNORE).all()
        assert row.index.shape == (1, 1)
        assert row.cu_seqlens is not None
        assert row.cu_seqlens[-1] == 8 * cp * multiple


def test_a_length_that_does_not_fit_is_refused() -> None:
    batch = packed([5, 3])
    assert aligned_length(batch, cp=2, multiple=1) == 12
    with pytest.raises(AssertionError, match="does not fit"):
        shard_batch(batch, cp=2, rank=0, multiple=1, length=8)
    with pytest.raises(AssertionError, match="no multiple"):
        shard_batch(batch, cp=2, rank=0, multiple=1, length=14)


def test_the_second_half_of_a_sequence_is_held_in_reverse() -> None:
    batch = packed([8, 4])
    held = [row.input_ids[0].tolist() for row in rows(batch, 2, 1)]
    assert held == [[1, 2, 7, 8, 9, 12], [3, 4, 5, 6, 10, 11]]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_meet_the_keys_since_their_sequence_began(cp: int, seed: int) -> None:
    """The keys of every chunk are those from the start of its sequence to its last query."""
    batch = packed(lengths(seed))
    shares = rows(batch, cp, 1)
    ends = shares[0].cu_seqlens
    assert ends is not None
    key = tuple(ends.tolist())
    joined = torch.cat([row.input_ids for row in shares], 1)[0]
    natural = joined[full_spans(key, cp, CPU).order]
    # Places distinguish the padding of different sequences.
    place = torch.arange(len(natural))
    placed = torch.empty_like(place)
    placed[full_spans(key, cp, CPU).order] = place
    work = []
    for rank in range(cp):
        pieces = ring_spans(key, cp, rank, CPU)
        queries = placed.chunk(cp)[rank].split(list(pieces.queries))
        keys = placed[pieces.order].split(list(pieces.keys))
        for q, k in zip(queries, keys, strict=True):
            begin = ends[ends <= q[0]].max()
            assert torch.equal(k, torch.arange(int(begin), int(q[-1]) + 1))
            assert torch.equal(k[-len(q) :], q)
        work.append(sum(pieces.keys))
    assert len(set(work)) == 1
