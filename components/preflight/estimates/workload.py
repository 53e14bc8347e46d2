"""Shapes of the batches of a run, from its packing plan."""

from functools import lru_cache

import numpy as np

from components.contracts.configs import Prepared
from components.contracts.data import BatchShard, BatchStats
from components.data.loader import PreparedData, TokenDataLoader
from components.preflight.estimates.quantities import MicrobatchShape

LARGEST = 16
"""Number of micro-batches whose labels are counted."""
LARGEST_UNPAIRED = 256
"""The same for unpaired data, in which other micro-batches may have the most trained tokens."""


@lru_cache(maxsize=64)
def largest_microbatch(data: Prepared, micro_batch_size: int, dp_size: int) -> MicrobatchShape:
    """Return the shape of the micro-batch of the first epoch that has the most tokens.

    Without packing, a sample has one row per sequence. The number of labels is the maximum over the
    ``LARGEST`` largest micro-batches. In unpaired data, every second sequence is a mismatched answer, on
    which no loss trains; the length is then the maximum over the trained tokens of these micro-batches.
    """
    assert isinstance(data, PreparedData)
    tokens, plans = data.train.open()
    plan, packed, unpaired = plans.plan(0), data.packing != "none", tokens.desirable is not None
    sizes = plan.microbatch_lengths(micro_batch_size, packed=packed)
    labels = trained = 0
    for number in np.argsort(-sizes, kind="stable")[: LARGEST_UNPAIRED if unpaired else LARGEST].tolist():
        stop = min((number + 1) * micro_batch_size, plan.num_rows)
        segments = plan.rows(number * micro_batch_size, stop).tolist()
        segments = [segment for segment in segments if not unpaired or segment[0] % 2 == 0]
        lengths = [last - first for _, first, last in segments]
        trained = max(trained, sum(lengths) if packed else max(lengths))
        targets = (tokens.mask(seq, first + 1, last + 1) for seq, first, last in segments)
        labels = max(labels, sum(int(np.count_nonzero(mask)) for mask in targets))
    longest, each = int(sizes.max()), 1 if packed else tokens.sequences_per_sample
    rows = data.global_batch_size if data.streamed else min(data.global_batch_size, plan.num_rows)
    lines = micro_batch_size * (1 if unpaired else each)
    length = trained if unpaired else longest
    return MicrobatchShape(
        rows=lines,
        length=-(-length // lines) if packed else length,
        labels=labels,
        num_microbatches=-(-rows // (dp_size * micro_batch_size)),
        no_grad_ratio=longest * micro_batch_size * each / (length * lines) - 1,
        longest_sequence=int((plan.segments[:, 2] - plan.segments[:, 1]).max()),
    )


def first_steps(data: Prepared, count: int = 8) -> range:
    """Return the numbers of the first ``count`` global batches, or of all if there are fewer."""
    return range(min(count, data.num_steps))


@lru_cache(maxsize=32)
def step_stats(data: Prepared, step: int) -> BatchStats:
    """Return the statistics of global batch ``step``."""
    return _train_loader(data).stats(step)


@lru_cache(maxsize=256)
def padded_tokens(data: Prepared, micro_batch_size: int, step: int) -> int:
    """Return the number of computed tokens of global batch ``step``, with the padding of padded rows."""
    assert isinstance(data, PreparedData)
    if data.packing != "none":
        return step_stats(data, step).num_computed_tokens
    unpaired, total = _is_unpaired(data), 0
    batch = _train_loader(data).batch(step)
    for rows in batch.shares(BatchShard(data.global_batch_size, micro_batch_size)):
        segments = np.concatenate(rows)
        segments = segments[segments[:, 0] % 2 == 0] if unpaired else segments
        lengths = segments[:, 2] - segments[:, 1]
        total += len(lengths) * int(lengths.max(initial=0))
    return total


@lru_cache(maxsize=4)
def _train_loader(data: Prepared) -> TokenDataLoader:
    assert isinstance(data, PreparedData)
    return data.train_loader(BatchShard(data.global_batch_size, micro_batch_size=1))


@lru_cache(maxsize=4)
def _is_unpaired(data: PreparedData) -> bool:
    return data.train.open()[0].desirable is not None
