"""The answers of preference records as single answers, for ``stage=kto``."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from components.data.records.record_files import PairAnswer, Record, Unreadable
from components.data.records.samples import Sample

_TOGETHER = 1000
"""Number of records whose chosen answers are followed by their rejected ones. It is the batch size of
``datasets.map``, with which TRL splits a data set."""


def split_pairs(
    items: Iterator[tuple[Record | Sample | Unreadable, str]],
) -> Iterator[tuple[PairAnswer | Unreadable, str]]:
    """Yield both answers of each record as items of their own.

    The answers to one prompt are kept apart, because KTO compares a prompt with the next item's answer. A
    record that cannot be read gives two items, too, so that ``pair_numbers`` is right.
    """
    while batch := list(islice(items, _TOGETHER)):
        for chosen in (True, False):
            for record, origin in batch:
                if isinstance(record, Unreadable):
                    yield record, origin
                else:
                    assert isinstance(record, dict), "samples are not split"
                    yield PairAnswer(record, chosen), origin


def pair_numbers(num_items: int) -> npt.NDArray[np.int64]:
    """Return the number of the record of each of the ``num_items`` items that ``split_pairs`` yields."""
    item = np.arange(num_items)
    first = item // (2 * _TOGETHER) * _TOGETHER  # record of the batch
    size = np.minimum(num_items // 2 - first, _TOGETHER)
    return first + (item - 2 * first) % size
