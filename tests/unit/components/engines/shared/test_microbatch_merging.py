"""Merged micro-batches give the same results as separate ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.contracts.batch import Batch
from components.data.collators import collate_packed
from components.engines.shared.microbatch_merging import group_microbatches, largest_number, merge, unmerge
from components.engines.shared.varlen_attention import ATTENTION, attention_kwargs, sequence_spans
from tests.pairs import make_pairs, plan_pairs
from tests.unit.components.engines.shared.test_varlen_attention import model, padded, sequences


def microbatches(path: Path) -> list[Batch]:
    """Return micro-batches with shared prompts, with no sequence, and without shared prompts."""
    store = make_pairs(path)
    shared, whole = (plan_pairs(store, shared=on, max_length=24) for on in (True, False))
    rows = [shared.row(0), shared.row(0)[:0], whole.row(0), shared.row(1)]
    return [collate_packed(store, [row], 0) for row in rows]


@torch.no_grad()
def logits(lm: Any, batch: Batch) -> torch.Tensor:
    kwargs = {"position_ids": batch.position_ids, "use_cache": False} | attention_kwargs(
        batch, sequence_spans(batch)
    )
    return lm(input_ids=batch.input_ids, **kwargs).logits


def test_a_joined_forward_is_that_of_each(tmp_path: Path) -> None:
    lm, batches = model("qwen3", ATTENTION), microbatches(tmp_path / "s")
    joined = merge(batches)
    parts = unmerge(logits(lm, joined), batches)
    for batch, found in zip(batches, parts, strict=True):
        torch.testing.assert_close(found, logits(lm, batch), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat(unmerge(joined.labels, batches), 1), joined.labels)
    assert joined.max_seqlen == max(batch.max_seqlen or 0 for batch in batches)
    assert torch.equal(joined.labelled(), replace(joined, label_index=None).labelled())
    keys = [batch.sequence_keys for batch in batches if batch.sequence_keys is not None]
    assert joined.sequence_keys is not None
    assert torch.equal(joined.sequence_keys, torch.cat(keys))
    assert joined.num_sequences == sum(batch.num_sequences for batch in batches)


def test_labels_that_were_found_are_not_searched_again(tmp_path: Path) -> None:
    """A second search would make the host wait for the GPU."""
    marked = [replace(batch, label_index=torch.tensor([0])) for batch in microbatches(tmp_path / "s")]
    assert len(merge(marked).labelled()) == len(marked)


def test_nothing_is_shared_where_nothing_was(tmp_path: Path) -> None:
    _, empty, whole, _ = microbatches(tmp_path / "s")
    joined = merge([empty, whole])
    assert (joined.prefix_lengths, joined.num_keys) == (None, None)
    assert joined.cu_seqlens is not None
    assert joined.cu_seqlens.diff().tolist() == [1, *whole.seqlens.tolist()]


@pytest.mark.parametrize(
    ("sizes", "number"),
    [
        ([3, 3, 3, 3, 3], 3),
        ([9, 1, 1], 2),
        ([1, 9, 1, 9], 2),
        ([9, 9, 1], 1),
        ([1, 9, 9], 2),
        ([50], 1),
        ([5, 5], 2),
    ],
)
def test_bins_are_as_large_as_the_bound_allows(sizes: list[int], number: int) -> None:
    assert largest_number(sizes, 10) == number


def test_padded_rows_stay_alone() -> None:
    batches = [padded(sequences()), padded(sequences())]
    assert group_microbatches(batches, None, torch.device("cpu")) == [[batch] for batch in batches]  # type: ignore[arg-type]
