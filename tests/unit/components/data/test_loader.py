"""A global batch depends only on the step, and any number of ranks divides it without loss."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard
from components.data.global_batch import Collation
from components.data.loader import TokenDataLoader
from components.data.packing import Plan, PlanOptions, plan_epoch
from components.data.store.token_store import TokenStore
from tests.listed_plans import ListedPlans
from tests.unit.components.data.store.test_token_store import make_store

MAX_LENGTH = 16
SHARD = {field.name for field in fields(BatchShard)}


def random_store(path: Path, per_sample: int) -> TokenStore:
    """Return a store of 26 samples with distinct tokens, so that the tokens of a batch show their origin."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, MAX_LENGTH + 1, 26 * per_sample)
    ends = np.cumsum(lengths)
    sequences = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    masks = [rng.integers(0, 2, length).tolist() for length in lengths]
    return make_store(path, sequences, masks, per_sample=per_sample, vocab_size=2000)


def make_plans(store: TokenStore, packing: Any, epochs: int = 2) -> list[Plan]:
    return [
        plan_epoch(
            store.lengths,
            PlanOptions(packing, MAX_LENGTH, shuffle=True),
            epoch,
            sequences_per_sample=store.sequences_per_sample,
        )
        for epoch in range(epochs)
    ]


def make_loader(store: TokenStore, plans: list[Plan], packing: str, **changes: Any) -> TokenDataLoader:
    settings: dict[str, Any] = {"drop_last": False}
    sizes = {"global_batch_size": 8, "micro_batch_size": 2}
    sizes |= {name: changes.pop(name) for name in SHARD & changes.keys()}
    shard = BatchShard(**sizes)
    listed = ListedPlans(plans)
    most = listed.num_steps(shard.global_batch_size, drop_last=changes.get("drop_last", False))
    settings["num_steps"] = min(most, changes.pop("max_steps", None) or most)
    return TokenDataLoader(store, listed, shard, Collation(packing != "none", 0), **settings | changes)


def sequences(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the input ids and labels of every real sequence of a batch."""
    found = []
    ids, labels = batch.input_ids.reshape(-1), batch.labels.reshape(-1)
    owner = batch.sequence_ids().reshape(-1)
    for i, length in enumerate(batch.seqlens.tolist()):
        if length:
            at = (owner == i).nonzero()[:length, 0]
            found.append((tuple(ids[at].tolist()), tuple(labels[at].tolist())))
    return found


CASES = [("bfd", 1), ("bfd", 2), ("none", 1), ("none", 2), ("concat", 1)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TokenStore, list[Plan], str]:
    packing, per_sample = request.param
    store = random_store(tmp_path / "s", per_sample)
    return store, make_plans(store, packing), packing


Case = tuple[TokenStore, list[Plan], str]


@pytest.mark.parametrize(("data_size", "micro_batch_size"), [(1, 8), (1, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_ranks_share_the_plan(case: Case, data_size: int, micro_batch_size: int) -> None:
    store, plans, packing = case
    loaders = [
        make_loader(store, plans, packing, dp_rank=rank, dp_size=data_size, micro_batch_size=micro_batch_size)
        for rank in range(data_size)
    ]
    alone = make_loader(store, plans, packing, micro_batch_size=8)
    for step in range(alone.num_steps):
        shares = [loader.microbatches(step) for loader in loaders]
        assert len({len(share) for share in shares}) == 1
        [whole] = alone.microbatches(step)
        # The order of the plan is micro-batch 0 of every rank, then micro-batch 1 of every rank.
        turns = [share[j] for j in range(len(shares[0])) for share in shares]
        assert [one for batch in turns for one in sequences(batch)] == sequences(whole)


def test_an_epoch_is_the_plan(case: Case) -> None:
    store, plans, packing = case
    loader = make_loader(store, plans, packing)
    steps = [math.ceil(plan.num_rows / 8) for plan in plans]
    assert loader.num_steps == sum(steps)
    for epoch, plan in enumerate(plans):
        first = sum(steps[:epoch])
        batches = [
            batch for step in range(first, first + steps[epoch]) for batch in loader.microbatches(step)
        ]
        lengths = [len(ids) for batch in batches for ids, _ in sequences(batch)]
        assert lengths == (plan.segments[:, 2] - plan.segments[:, 1]).tolist()


@pytest.mark.parametrize(
    ("rows", "data_size", "expected"), [(9, 1, 1), (9, 2, 1), (13, 1, 3), (13, 2, 2), (16, 2, 2)]
)
def test_a_short_last_batch(tmp_path: Path, rows: int, data_size: int, expected: int) -> None:
    store = random_store(tmp_path / "s", 1)
    [plan] = make_plans(store, "none", epochs=1)
    plan = Plan(plan.segments[:rows], plan.row_offsets[: rows + 1])
    shares = [
        make_loader(store, [plan], "none", dp_rank=rank, dp_size=data_size).microbatches(1)
        for rank in range(data_size)
    ]
    assert [len(share) for share in shares] == [expected] * data_size
    assert sum(len(sequences(batch)) for share in shares for batch in share) == rows - 8
    assert all(batch.num_sequences == 2 for share in shares for batch in share)


@pytest.mark.parametrize(
    ("drop_last", "max_steps", "expected"), [(False, None, 8), (True, None, 6), (False, 5, 5)]
)
def test_number_of_steps(tmp_path: Path, drop_last: bool, max_steps: int | None, expected: int) -> None:
    store = random_store(tmp_path / "s", 1)  # 26 samples make 3 full batches and one of 2, in both epochs
    plans = make_plans(store, "none")
    loader = make_loader(store, plans, "none", drop_last=drop_last, max_steps=max_steps)
    assert loader.num_steps == expected
    if drop_last:
        assert all(loader.stats(step).num_samples == 8 for step in range(loader.num_steps))


def test_stats_are_those_of_the_whole_batch(case: Case) -> None:
    store, plans, packing = case
    loader = make_loader(store, plans, packing, dp_rank=1, dp_size=4, micro_batch_size=1)
    alone = make_loader(store, plans, packing, micro_batch_size=8)
    for step in range(loader.num_steps):
        [batch] = alone.microbatches(step)
        stats, seqlens = loader.stats(step), batch.seqlens[batch.seqlens > 0].double()
        assert stats.num_tokens == seqlens.sum()
        assert stats.num_labels == (batch.labels != IGNORE).sum()
        assert stats.seqlen_mean == pytest.approx(seqlens.mean().item())
        assert stats.seqlen_max == seqlens.max()
        assert stats.sum_squared_seqlens == (seqlens**2).sum()
    epoch = math.ceil(plans[0].num_rows / 8)
    assert sum(loader.stats(step).num_samples for step in range(epoch)) == 26


def test_a_step_needs_no_history(case: Case) -> None:
    """A fresh loader yields the same batches at any step, as a resumed run requires."""
    store, plans, packing = case
    old = make_loader(store, plans, packing)
    batches = [old.microbatches(step) for step in range(old.num_steps)]
    for step in reversed(range(old.num_steps)):
        fresh = make_loader(TokenStore.open(store.path), plans, packing).microbatches(step)
        for one, other in zip(fresh, batches[step], strict=True):
            assert torch.equal(one.input_ids, other.input_ids)
            assert torch.equal(one.labels, other.labels)


def test_a_sequence_has_another_number_in_every_step(case: Case) -> None:
    loader = make_loader(*case)
    batches = [batch for step in range(loader.num_steps) for batch in loader.microbatches(step)]
    found = torch.cat([batch.sequence_keys[batch.seqlens > 0] for batch in batches])
    assert len(found.unique()) == len(found)


def test_epochs_are_counted(tmp_path: Path) -> None:
    store = random_store(tmp_path / "s", 1)
    loader = make_loader(store, make_plans(store, "none"), "none")
    assert [loader.epoch(step) for step in range(9)] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
