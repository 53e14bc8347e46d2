"""Rows of a plan to a ``Batch``. Labels are shifted here and nowhere else."""

from collections.abc import Sequence

import numpy as np
import torch

from components.contracts.batch import DESIRABLE, IGNORE, KL_COMPLETION, UNDESIRABLE, Batch
from components.data.packing import Ints
from components.data.store.token_store import TokenSequences


def collate_packed(store: TokenSequences, rows: Sequence[Ints], pad_id: int) -> Batch:
    """All segments of all rows end to end: ``[1, T]``. Empty rows add nothing, unless there is no other.

    Args:
        rows: the segments of every row, int64 ``[n, 3]`` (see ``Plan``).
    """
    segments = np.concatenate(rows)
    if not len(segments):
        return _empty(store, pad_id)
    sequences = [read_segment(store, segment) for segment in segments.tolist()]
    spans = segments[:, 2] - segments[:, 1]
    prefixes = prefix_lengths(store, segments)
    cu_seqlens = np.append(0, np.cumsum(spans))
    places = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - prefixes, spans)
    return Batch(
        input_ids=torch.from_numpy(np.concatenate([ids for ids, _ in sequences]))[None],
        labels=torch.from_numpy(np.concatenate([labels for _, labels in sequences]))[None],
        position_ids=torch.from_numpy(places)[None],
        seqlens=torch.from_numpy(spans.astype(np.int32)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int((spans + prefixes).max()),
        prefix_lengths=torch.from_numpy(prefixes.astype(np.int32)) if prefixes.any() else None,
        num_keys=int((spans + prefixes).sum()) if prefixes.any() else None,
        pair_index=_pair_index(store, segments),
        sequence_labels=_sequence_labels(store, segments),
    )


def collate_padded(store: TokenSequences, rows: Sequence[Ints], pad_id: int) -> Batch:
    """One sequence a line, ``[B, T]``, padded on the right to the longest. A pair takes two lines.

    An empty row is as many lines of padding as a sample has sequences.

    Args:
        rows: the segments of every row, int64 ``[n, 3]``: of one sample, or none.
    """
    per_row = store.sequences_per_sample
    assert all(len(row) in (0, per_row) for row in rows)
    missing = np.zeros((per_row, 3), np.int64)
    segments = np.concatenate([row if len(row) else missing for row in rows])
    seqlens = segments[:, 2] - segments[:, 1]
    shape = len(segments), max(1, int(seqlens.max()))
    input_ids, labels = np.full(shape, pad_id, np.int64), np.full(shape, IGNORE, np.int64)
    for line, segment in enumerate(segments.tolist()):
        if seqlens[line]:
            input_ids[line, : seqlens[line]], labels[line, : seqlens[line]] = read_segment(store, segment)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(labels),
        position_ids=torch.arange(shape[1]).repeat(shape[0], 1),
        seqlens=torch.from_numpy(seqlens.astype(np.int32)),
        pair_index=_pair_index(store, segments),
        sequence_labels=_sequence_labels(store, segments),
    )


def prefix_lengths(store: TokenSequences, segments: Ints) -> Ints:
    """int64 ``[n]``: what a rejected sequence has left to the chosen one before it; 0 for anything else."""
    if store.sequences_per_sample == 1:
        return np.zeros(len(segments), np.int64)  # a document that begins later was cut
    return np.asarray(segments[:, 1])


def read_segment(store: TokenSequences, segment: Sequence[int]) -> tuple[Ints, Ints]:
    """Input ids and labels of one segment, int64 ``[stop - start]``.

    The last label is the token after the segment, which a cut document has in another row.
    """
    sequence, start, stop = segment
    tokens = store.tokens(sequence, start, stop + 1).astype(np.int64)
    targets = store.mask(sequence, start + 1, stop + 1)
    labels = np.full(stop - start, IGNORE, np.int64)
    labels[: len(targets)] = np.where(targets, tokens[1:], IGNORE)
    return tokens[: stop - start], labels


def _pair_index(store: TokenSequences, segments: Ints) -> torch.Tensor | None:
    """Chosen and rejected alternate, numbered within the micro-batch; -1 for a line of padding."""
    if not _has_pairs(store):
        return None
    real = segments[:, 2] > segments[:, 1]
    index = np.where(real, np.arange(len(segments)), -1)
    assert (index[real] % 2 == segments[real, 0] % 2).all(), "chosen comes first"
    return torch.from_numpy(index)


def _has_pairs(store: TokenSequences) -> bool:
    return store.sequences_per_sample == 2 and store.desirable is None


def _sequence_labels(store: TokenSequences, segments: Ints) -> torch.Tensor | None:
    """Answers and mismatched ones alternate; a line of padding in the place of an answer is -1."""
    if store.desirable is None:
        return None
    real = segments[:, 2] > segments[:, 1]
    labels = np.where(store.desirable[segments[:, 0] // 2], DESIRABLE, UNDESIRABLE)
    assert (segments[real, 0] % 2 == np.arange(len(segments))[real] % 2).all(), "the answer comes first"
    labels = np.where(real, labels, -1)
    labels[1::2] = KL_COMPLETION
    return torch.from_numpy(labels.astype(np.int64))


def _empty(store: TokenSequences, pad_id: int) -> Batch:
    return Batch(
        input_ids=torch.tensor([[pad_id]]),
        labels=torch.tensor([[IGNORE]]),
        position_ids=torch.tensor([[0]]),
        seqlens=torch.tensor([0], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        pair_index=torch.tensor([-1]) if _has_pairs(store) else None,
        sequence_labels=None if store.desirable is None else torch.tensor([-1]),
    )
