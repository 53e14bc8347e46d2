"""The plan of an epoch holds every sample once, and no row is longer than the maximum length."""

from typing import Any

import numpy as np
import pytest

from components.data.packing import (
    WINDOW,
    Plan,
    PlanOptions,
    best_fit_decreasing,
    hold_out,
    plan_epoch,
)
from components.data.store.checked_files import DamagedFile


def lengths_of(count: int, longest: int = 64) -> np.ndarray:
    return np.random.default_rng(count).integers(2, longest + 1, count)


def plan(lengths: Any, **changes: Any) -> Plan:
    options: dict[str, Any] = {"packing": "bfd", "max_length": 64, "shuffle": True, "seed": 3}
    options |= {name: changes.pop(name) for name in options.keys() & changes.keys()}
    epoch = changes.pop("epoch", 0)
    return plan_epoch(np.asarray(lengths, dtype=np.int64), PlanOptions(**options), epoch, **changes)


def sizes(one: Plan) -> np.ndarray:
    """Return the number of tokens of every row."""
    spans = one.segments[:, 2] - one.segments[:, 1]
    return np.add.reduceat(spans, one.row_offsets[:-1])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", ["bfd", "none"])
@pytest.mark.parametrize("per_sample", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 50, 2 * WINDOW + 10])
def test_every_sample_once_and_whole(count: int, per_sample: int, packing: str, shuffle: bool) -> None:
    lengths = lengths_of(count * per_sample)
    one = plan(lengths, sequences_per_sample=per_sample, packing=packing, shuffle=shuffle)
    assert sorted(one.segments[:, 0].tolist()) == list(range(len(lengths)))
    assert (one.segments[:, 1] == 0).all()
    assert (one.segments[:, 2] == lengths[one.segments[:, 0]]).all()
    assert sizes(one).max() <= per_sample * 64
    pairs = one.segments[:, 0].reshape(-1, per_sample)
    assert (pairs == pairs[:, :1] + np.arange(per_sample)).all()
    assert (one.row_offsets % per_sample == 0).all()
    if packing == "none":
        assert one.num_rows == count


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("max_length", [2, 7, 64, 10_000])
def test_concat_holds_every_token_once_in_rows_of_max_length(max_length: int, shuffle: bool) -> None:
    lengths = lengths_of(40)
    one = plan(lengths, packing="concat", max_length=max_length, shuffle=shuffle)
    seen = sorted((seq, t) for seq, start, stop in one.segments.tolist() for t in range(start, stop))
    assert seen == [(seq, t) for seq, length in enumerate(lengths) for t in range(length)]
    assert (sizes(one)[:-1] == max_length).all()
    assert 0 < sizes(one)[-1] <= max_length
    assert (one.segments[:, 2] > one.segments[:, 1]).all()


def test_concat_goes_on_where_a_row_ended() -> None:
    one = plan([5, 3, 2], packing="concat", max_length=4, shuffle=False)
    assert one.segments.tolist() == [[0, 0, 4], [0, 4, 5], [1, 0, 3], [2, 0, 2]]
    assert one.row_offsets.tolist() == [0, 1, 3, 4]


def test_best_fit_decreasing_by_hand() -> None:
    # 7 opens a bin (room 3), 6 another (room 4); 4 and 3 fill the two exactly, and 2 opens a third bin.
    assert best_fit_decreasing(np.array([2, 3, 7, 4, 6]), 10) == [[0], [1, 2], [3, 4]]


def test_bfd_fills_rows() -> None:
    lengths = lengths_of(2 * WINDOW)
    assert plan(lengths).num_rows <= 1.02 * np.ceil(lengths.sum() / 64)


def test_the_length_of_samples_does_not_follow_time() -> None:
    """Rows are shuffled, because a packed window ends with rows of many short samples (correlation -0.3)."""
    lengths = lengths_of(WINDOW, longest=16)
    found = []
    for epoch in range(8):
        one = plan(lengths, epoch=epoch)
        longest = [lengths[one.row(i)[:, 0]].max() for i in range(one.num_rows)]
        found.append(np.corrcoef(np.arange(one.num_rows), longest)[0, 1])
    assert abs(np.mean(found)) < 0.06


@pytest.mark.parametrize("packing", ["bfd", "none", "concat"])
def test_without_shuffle_order_is_that_of_the_file(packing: str) -> None:
    one = plan(lengths_of(300), packing=packing, shuffle=False)
    firsts = [one.row(i)[0, 0] for i in range(one.num_rows)]
    assert firsts == sorted(firsts)
    assert all((np.diff(one.row(i)[:, 0]) > 0).all() for i in range(one.num_rows))


@pytest.mark.parametrize("packing", ["bfd", "none", "concat"])
def test_a_plan_is_a_function_of_its_arguments(packing: str) -> None:
    lengths = lengths_of(300)

    def order(**changes: Any) -> list[list[int]]:
        return plan(lengths, packing=packing, **changes).segments.tolist()

    assert order() == order()
    assert order(seed=4) != order()
    assert order(epoch=1) != order()
    assert order(seed=3 + 2**40) != order()


def test_the_order_is_pinned() -> None:
    """A resumed run has the plan it began with, even on another version of numpy."""
    one = plan([2] * 8, packing="none")
    assert one.segments[:, 0].tolist() == PINNED


PINNED = [5, 4, 3, 1, 7, 6, 0, 2]


@pytest.mark.parametrize(("weight", "times"), [(1.0, {1}), (2.0, {2}), (0.5, {0, 1}), (1.25, {1, 2})])
@pytest.mark.parametrize("packing", ["bfd", "none"])
def test_repeats(packing: str, weight: float, times: set[int]) -> None:
    count = 400
    repeats = np.full(count, weight)
    drawn = [
        np.bincount(
            plan([4] * count, repeats=repeats, epoch=epoch, packing=packing).segments[:, 0], minlength=count
        )
        for epoch in range(2)
    ]
    for counts in drawn:
        assert set(counts.tolist()) == times
        assert counts.sum() == weight * count
    assert (drawn[0] != drawn[1]).any() == (weight % 1 > 0)


def test_repeats_differ_by_sample() -> None:
    one = plan([4] * 6, repeats=np.array([0, 0, 1, 1, 3, 3.0]), packing="none")
    assert np.bincount(one.segments[:, 0], minlength=6).tolist() == [0, 0, 1, 1, 3, 3]


def test_sources_with_the_same_fraction_are_drawn_from_by_themselves() -> None:
    repeats = np.repeat([0.5, 1.0, 1.5], [10, 3, 40])
    repeats[4] = 0  # held out
    for epoch in range(9):
        drawn = plan([4] * 53, repeats=repeats, firsts=(0, 10, 13), epoch=epoch, packing="none")
        counts = np.bincount(drawn.segments[:, 0], minlength=53)
        assert counts[:10].sum() in (4, 5)
        assert (counts[10:13].sum(), counts[13:].sum()) == (3, 60)


def test_the_draw_is_pinned() -> None:
    """Sources of other fractions are drawn as they were before sources of the same one were told apart."""
    one = plan([2] * 8, repeats=np.repeat([0.5, 1.25], 4), firsts=(0, 4), packing="none")
    assert one.segments[:, 0].tolist() == [6, 5, 3, 7, 6, 0, 4]


def test_a_fraction_of_few_samples_is_right_on_average() -> None:
    drawn = [plan([4], repeats=np.array([0.3]), epoch=epoch, packing="none").num_rows for epoch in range(500)]
    assert 0.22 < np.mean(drawn) < 0.38


@pytest.mark.parametrize("packing", ["bfd", "none", "concat"])
def test_no_sample_makes_no_row(packing: str) -> None:
    assert plan([4, 4], repeats=np.zeros(2), packing=packing).num_rows == 0


@pytest.mark.parametrize(("count", "fraction", "held"), [(100, 0.1, 10), (3, 0.01, 1), (1, 0.5, 1)])
def test_hold_out(count: int, fraction: float, held: int) -> None:
    every = np.ones(count, np.bool_)
    assert len({*hold_out(every, fraction, 0)}) == len(hold_out(every, fraction, 0)) == held
    assert (hold_out(every, fraction, 0) == hold_out(every, fraction, 0)).all()


def test_hold_out_follows_the_seed() -> None:
    every = np.ones(100, np.bool_)
    assert {*hold_out(every, 0.5, 0)} != {*hold_out(every, 0.5, 1)}


def test_what_is_held_out_is_never_trained_on_with_another_filter() -> None:
    every, some, one = np.ones(100, np.bool_), np.arange(100) % 3 > 0, np.arange(100) == 7
    drawn = hold_out(every, 0.2, 0)
    assert hold_out(some, 0.2, 0).tolist() == drawn[some[drawn]].tolist()
    assert hold_out(one, 0.01, 0).tolist() == [7], "at least one that is kept"
    assert not len(hold_out(every & False, 0.2, 0))


def test_a_saved_plan_is_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = plan(lengths_of(50))
    for _ in range(2):
        one.save(tmp_path / "plans" / "epoch")
    again = Plan.load(tmp_path / "plans" / "epoch")
    assert (again.segments == one.segments).all()
    assert (again.row_offsets == one.row_offsets).all()
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["epoch"]
    (tmp_path / "plans" / "epoch" / "segments.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DamagedFile):
        Plan.load(tmp_path / "plans" / "epoch")
