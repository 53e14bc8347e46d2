"""Collate rows of a plan into a ``Batch``. Labels are shifted here and nowhere else."""

from collections.abc import Sequence

import numpy as np
import torch

from components.contracts.batch import DESIRABLE, IGNORE, KL_COMPLETION, UNDESIRABLE, Batch
from components.data.packing import Ints
from components.data.store.token_sequences import TokenSequences


def collate_packed(store: TokenSequences, rows: Sequence[Ints], pad_id: int) -> Batch:
    """Concatenate all segments of all rows into one row, ``[1, T]``.

    Empty rows add nothing. If all rows are empty, the batch holds one padding token.

    Args:
        rows: the segments of each row, int64 ``[n, 3]`` (see ``Plan``).
    """
    segments = np.concatenate(rows)
    if not len(segments):
        unpaired, ranked = store.desirable is not None, store.margins is not None
        return Batch.empty(pad_id, pairs=_has_pairs(store), unpaired=unpaired, ranked=ranked)
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
        sequence_keys=_sequence_keys(segments),
        pair_index=_pair_index(store, segments),
        margins=_margins(store, segments),
        sequence_labels=_sequence_labels(store, segments),
        pad_id=pad_id,
    )


def collate_padded(store: TokenSequences, rows: Sequence[Ints], pad_id: int) -> Batch:
    """Place one sequence per line, ``[B, T]``, padded on the right to the length of the longest one.

    A pair takes two lines. An empty row becomes as many lines of padding as a sample has sequences.

    Args:
        rows: the segments of each row, int64 ``[n, 3]``: those of one sample, or none.
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
        sequence_keys=_sequence_keys(segments),
        pair_index=_pair_index(store, segments),
        margins=_margins(store, segments),
        sequence_labels=_sequence_labels(store, segments),
        pad_id=pad_id,
    )


def prefix_lengths(store: TokenSequences, segments: Ints) -> Ints:
    """Return the length of the prefix that each segment shares with the segment before it, int64 ``[n]``.

    The length is 0 except for a rejected sequence whose prompt is computed only in the chosen sequence.
    """
    if store.sequences_per_sample == 1:
        return np.zeros(len(segments), np.int64)  # a document segment with a later start was cut
    return np.asarray(segments[:, 1])


def read_segment(store: TokenSequences, segment: Sequence[int]) -> tuple[Ints, Ints]:
    """Return input ids and labels of one segment, int64 ``[stop - start]`` each.

    The last label is ``IGNORE`` if the segment ends its sequence. Otherwise, as for a document that is cut,
    it is the token after the segment, which is in another row.
    """
    sequence, start, stop = segment
    tokens = store.tokens(sequence, start, stop + 1).astype(np.int64)
    targets = store.mask(sequence, start + 1, stop + 1)
    labels = np.full(stop - start, IGNORE, np.int64)
    labels[: len(targets)] = np.where(targets, tokens[1:], IGNORE)
    return tokens[: stop - start], labels


def _sequence_keys(segments: Ints) -> torch.Tensor:
    """Return a unique number for each segment, int64 ``[n]``, computed from its sequence and its start.

    The start is needed because a document may be cut into several segments.
    """
    return torch.from_numpy(segments[:, 0] * (1 << 20) + segments[:, 1])


def _pair_index(store: TokenSequences, segments: Ints) -> torch.Tensor | None:
    """Return 0, 1, 2, ... for alternating chosen and rejected sequences; -1 for a line of padding."""
    if not _has_pairs(store):
        return None
    real = segments[:, 2] > segments[:, 1]
    index = np.where(real, np.arange(len(segments)), -1)
    assert (index[real] % 2 == segments[real, 0] % 2).all(), "chosen comes first"
    return torch.from_numpy(index)


def _margins(store: TokenSequences, segments: Ints) -> torch.Tensor | None:
    return None if store.margins is None else torch.from_numpy(store.margins[segments[:, 0] // 2])


def _has_pairs(store: TokenSequences) -> bool:
    return store.sequences_per_sample == 2 and store.desirable is None


def _sequence_labels(store: TokenSequences, segments: Ints) -> torch.Tensor | None:
    """Return DESIRABLE or UNDESIRABLE (-1 for padding) of each answer, alternating with KL_COMPLETION."""
    if store.desirable is None:
        return None
    real = segments[:, 2] > segments[:, 1]
    labels = np.where(store.desirable[segments[:, 0] // 2], DESIRABLE, UNDESIRABLE)
    assert (segments[real, 0] % 2 == np.arange(len(segments))[real] % 2).all(), "the answer comes first"
    labels = np.where(real, labels, -1)
    labels[1::2] = KL_COMPLETION
    return torch.from_numpy(labels.astype(np.int64))
