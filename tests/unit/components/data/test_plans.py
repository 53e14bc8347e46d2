"""Plans that are made when they are needed: the same as if all had been made before the run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.contracts.data import BatchShard
from components.data import packing
from components.data.global_batch import Collation
from components.data.loader import TokenDataLoader
from components.data.packing import PlanOptions, plan_epoch
from components.data.plans import CachedPlans, StepIndex
from components.data.store.token_store import TokenStore
from tests.listed_plans import ListedPlans
from tests.unit.components.data.test_loader import random_store

OPTIONS: list[dict[str, Any]] = [
    {"packing": "bfd", "shuffle": True},
    {"packing": "bfd", "shuffle": False},
    {"packing": "none", "shuffle": True},
    {"packing": "concat", "shuffle": True},
]


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return random_store(tmp_path / "store", 1)


def loader(store: TokenStore, plans: Any, **changes: Any) -> TokenDataLoader:
    settings: dict[str, Any] = {"drop_last": False, "num_steps": 10**9}
    return TokenDataLoader(store, plans, BatchShard(2, 1), Collation(True, 0), **settings | changes)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("repeats", [1.0, 2.0, 0.5, 0.1])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_every_step_is_that_of_plans_made_ahead(
    tmp_path: Path,
    store: TokenStore,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    repeats: float,
    drop_last: bool,
) -> None:
    monkeypatch.setattr(packing, "WINDOW", 5)  # such that the number of rows differs between epochs
    chosen, often = PlanOptions(max_length=20, seed=3, **options), np.full(26, repeats)
    made = [plan_epoch(store.lengths, chosen, epoch, repeats=often) for epoch in range(12)]
    ahead = loader(store, ListedPlans(made), drop_last=drop_last)
    lazy = loader(
        store, CachedPlans(tmp_path / "plans", store, chosen, often, share_prompt=False), drop_last=drop_last
    )
    steps = ListedPlans(made).num_steps(2, drop_last=drop_last)
    for step in [steps - 1, *range(steps)]:  # a run that resumes begins anywhere
        assert np.array_equal(lazy.segments(step), ahead.segments(step))
        assert lazy.epoch(step) == pytest.approx(ahead.epoch(step))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_steps_that_are_not_run_cost_nothing(
    tmp_path: Path, store: TokenStore, options: dict[str, Any]
) -> None:
    chosen = PlanOptions(max_length=20, **options)
    plans = CachedPlans(tmp_path / "plans", store, chosen, np.ones(26), share_prompt=False)
    run = loader(store, plans)
    assert run.microbatches(0)
    assert run.microbatches(10**9 - 1)
    *_, epoch_end = StepIndex(plans, 2, drop_last=False).locate(0)
    assert max(step for step, _ in run.steps_with_new_samples()) < epoch_end
    assert len(list((tmp_path / "plans").glob("epoch_*"))) == (2 if chosen.shuffle else 1)


def test_ranks_that_come_at_once_make_a_plan_once(
    tmp_path: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(lengths: Any, options: Any, epoch: int, **rest: Any) -> Any:
        made.append(epoch)
        return plan_epoch(lengths, options, epoch, **rest)

    monkeypatch.setattr("components.data.plans.plan_epoch", counted)
    chosen = PlanOptions("bfd", 20, shuffle=True)

    def rank(_: int) -> list[list[int]]:
        plans = CachedPlans(tmp_path / "plans", store, chosen, np.ones(26), share_prompt=False)
        return [plans.plan(epoch).segments.tolist() for epoch in range(3)]

    with ThreadPoolExecutor(6) as ranks:
        first, *others = ranks.map(rank, range(6))
    assert all(one == first for one in others)
    assert sorted(made) == [0, 1, 2]
