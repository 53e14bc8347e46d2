"""Stored reference log-probabilities do not depend on the ranks and batches that computed them."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard
from components.contracts.errors import TrainingError
from components.data.loader import PreparedData, SplitFiles, StoreFiles
from components.data.packing import PlanOptions
from components.data.plans import CachedPlans, count_steps
from components.data.store.token_store import TokenStore
from components.reference.precompute import precompute
from tests.pairs import make_pairs
from tests.unit.components.data.store.test_token_store import make_store

MAX_LENGTH = 20


@dataclass
class Scores:
    """A fake engine, whose log-probability of a token depends only on the token and its position."""

    dp_rank: int = 0
    dp_size: int = 1
    answers: bool = True
    """Whether this rank is on the last pipeline stage; other stages return None."""
    factor: float = 1.0
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def logps(self, batches: Sequence[Batch], *, reference: bool) -> list[Tensor] | None:
        assert reference
        self.asked += [tuple(batch.input_ids.flatten().tolist()) for batch in batches]
        return [expected(batch, self.factor) for batch in batches] if self.answers else None

    def barrier(self) -> None:
        pass


def expected(batch: Batch, factor: float = 1.0) -> Tensor:
    there = batch.labels != IGNORE
    return torch.where(there, -factor * (batch.labels + batch.position_ids / 100 + 1), 0.0)


def prepare(
    store: TokenStore, folder: Path, packing: Any, epochs: int = 1, shared: bool = False
) -> PreparedData:
    options, repeats = PlanOptions(packing, MAX_LENGTH, shuffle=True), np.ones(len(store.lengths) // 2)
    plans = CachedPlans(folder, store, options, repeats, shared)
    plans.save_repeats()
    steps = epochs * count_steps(plans.rows(0), 2, drop_last=False)
    split = SplitFiles(
        (StoreFiles(str(store.path)),), str(folder), options, shared, num_steps=steps, drop_last=False
    )
    return PreparedData(split, {}, packing, 0, 2, "identity", audit=None)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return make_pairs(tmp_path / "store")


def fill(data: PreparedData, tmp_path: Path, *engines: Scores, micro_batch_size: int = 1) -> Path:
    """Precompute as the ranks do: each writes its part, and the last merges the parts."""
    for number, engine in enumerate(engines):
        last = number == len(engines) - 1
        precompute(
            engine,  # type: ignore[arg-type]
            data,
            tmp_path / "reference",
            scratch=tmp_path / "scratch",
            micro_batch_size=micro_batch_size,
            writes=False,
            merges=last,
            beat=int,
        )
    shutil.rmtree(tmp_path / "scratch")
    return tmp_path / "reference"


def batches(data: PreparedData, folder: Path | None, micro_batch_size: int = 1) -> list[Batch]:
    loader = data.loader(data.train, BatchShard(2, micro_batch_size), folder)
    return [batch for step in range(loader.num_steps) for batch in loader.microbatches(step)]


def assert_attached(data: PreparedData, folder: Path, factor: float = 1.0) -> None:
    found = batches(data, folder)
    assert any((batch.labels != IGNORE).any() for batch in found)
    for batch in found:
        assert batch.ref_logps is not None
        assert batch.ref_logps.dtype == torch.float32
        torch.testing.assert_close(batch.ref_logps, expected(batch, factor), rtol=0, atol=0)


FORMS: list[tuple[Any, bool]] = [("none", False), ("bfd", False), ("bfd", True)]


@pytest.mark.parametrize("written", FORMS)
@pytest.mark.parametrize("read", FORMS)
def test_what_one_form_computes_every_form_reads(
    store: TokenStore, tmp_path: Path, written: tuple[Any, bool], read: tuple[Any, bool]
) -> None:
    """Only the chosen sequence computes a shared prompt, and neither sequence reads its values."""
    source = prepare(store, tmp_path / "plans", written[0], shared=written[1])
    folder = fill(source, tmp_path, Scores())
    target = prepare(store, tmp_path / "others", read[0], epochs=2, shared=read[1])
    assert not target.missing_reference_logps(folder)
    assert_attached(target, folder)


def test_ranks_write_their_shares_and_copies_of_them_nothing(store: TokenStore, tmp_path: Path) -> None:
    """With two data-parallel ranks of two tensor-parallel ranks each, only the first of the two writes."""
    data = prepare(store, tmp_path / "plans", "none")
    ranks = [Scores(rank, 2, factor=factor) for rank in (0, 1) for factor in (1.0, 5.0)]
    assert_attached(data, fill(data, tmp_path, *ranks))


def test_a_first_stage_takes_nobodys_place(store: TokenStore, tmp_path: Path) -> None:
    data = prepare(store, tmp_path / "plans", "none")
    assert_attached(data, fill(data, tmp_path, Scores(answers=False), Scores()))


def test_every_sample_is_asked_about_once(store: TokenStore, tmp_path: Path) -> None:
    data, engine = prepare(store, tmp_path / "plans", "none", epochs=3), Scores()
    fill(data, tmp_path, engine)
    assert len(set(engine.asked)) == len(engine.asked) == len(store.lengths) // 2


def test_a_longer_run_adds_to_what_is_there(store: TokenStore, tmp_path: Path) -> None:
    whole = prepare(store, tmp_path / "plans", "none")
    train = replace(whole.train, num_steps=1)
    short = PreparedData(train, {}, "none", 0, 2, "identity", audit=None)  # type: ignore[arg-type]
    assert short.missing_reference_logps(tmp_path / "reference")
    folder = fill(short, tmp_path, Scores())
    assert not short.missing_reference_logps(folder)
    assert whole.missing_reference_logps(folder)
    with pytest.raises(TrainingError, match="lacks log-probabilities"):
        batches(whole, folder)
    fill(whole, tmp_path, Scores())
    assert not whole.missing_reference_logps(folder)


def test_what_a_run_did_not_ask_about_stays(store: TokenStore, tmp_path: Path) -> None:
    whole = prepare(store, tmp_path / "plans", "none")
    folder = fill(whole, tmp_path, Scores())
    train = replace(whole.train, num_steps=1)
    fill(PreparedData(train, {}, "none", 0, 2, "identity", audit=None), tmp_path, Scores())  # type: ignore[arg-type]
    assert_attached(whole, folder)


class Drifting(Scores):
    """A fake engine with new values at every call, as rounding differs between batches."""

    def logps(self, batches: Sequence[Batch], *, reference: bool) -> list[Tensor] | None:
        self.factor += 1
        return super().logps(batches, reference=reference)


def test_the_first_answer_counts(store: TokenStore, tmp_path: Path) -> None:
    """Each epoch drops one of five samples; a sample that is computed again with it keeps its first value."""
    made = prepare(store, tmp_path / "plans", "none", epochs=3)
    train = replace(made.train, num_steps=6, drop_last=True)
    data, engine = PreparedData(train, {}, "none", 0, 2, "identity", audit=None), Drifting()  # type: ignore[arg-type]
    folder = fill(data, tmp_path, engine)
    assert len(set(engine.asked)) == 5 < len(engine.asked)
    for number, batch in enumerate(batches(data, folder)[:4]):
        assert batch.ref_logps is not None
        assert torch.equal(batch.ref_logps, expected(batch, factor=2.0 + number // 2))


def test_a_damaged_file_is_computed_again(
    store: TokenStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = prepare(store, tmp_path / "plans", "none")
    folder = fill(data, tmp_path, Scores())
    (file,) = folder.glob("*.npy")
    file.write_bytes(file.read_bytes()[:-1])
    assert data.missing_reference_logps(folder)
    assert "damaged" in caplog.text
    fill(data, tmp_path, Scores())
    assert_attached(data, folder)


def test_other_tokens_have_a_file_of_their_own(store: TokenStore, tmp_path: Path) -> None:
    folder = fill(prepare(store, tmp_path / "plans", "none"), tmp_path, Scores())
    other = make_store(tmp_path / "other", [[1, 2, 3], [1, 2, 4]], [[0, 1, 1], [0, 1, 1]], per_sample=2)
    assert prepare(other, tmp_path / "more", "none").missing_reference_logps(folder)


def test_a_reference_that_is_not_finite_is_no_reference(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not numbers"):
        fill(prepare(store, tmp_path / "plans", "none"), tmp_path, Scores(factor=float("nan")))
