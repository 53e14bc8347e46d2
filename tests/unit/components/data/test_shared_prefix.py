"""Pairs with shared prompts give the log-probabilities of transformers on each sequence by itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import BatchShard
from components.data.collators import collate_packed
from components.data.global_batch import Collation
from components.data.loader import TokenDataLoader
from components.data.packing import PlanOptions, plan_epoch
from components.data.shared_prefix import shared_lengths
from components.data.store.token_store import TokenStore
from components.engines.shared.varlen_attention import ATTENTION, attention, attention_kwargs, sequence_spans
from tests.listed_plans import ListedPlans
from tests.pairs import PAIRS, make_pairs, plan_pairs
from tests.unit.components.data.store.test_token_store import make_store
from tests.unit.components.engines.shared.test_varlen_attention import MODELS, model


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return make_pairs(tmp_path / "s")


def pack(store: TokenStore, *, shared: bool) -> Batch:
    """Return all pairs in their order, packed into one row."""
    return collate_packed(store, [plan_pairs(store, shared=shared, max_length=512).row(0)], 0)


def logps(lm: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probability of every label, float32 ``[labels]``."""
    logits = lm(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **attention_kwargs(batch, sequence_spans(batch)),
    ).logits
    return labelled(logits[0], batch.labels[0])


def labelled(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != IGNORE
    return logits[kept].log_softmax(-1).gather(1, labels[kept, None])[:, 0]


def oracle(lm: nn.Module, batch: Batch) -> Tensor:
    """Return the log-probabilities of a batch without shared prompts, one sequence at a time."""
    spans = batch.seqlens.tolist()
    rows = zip(batch.input_ids[0].split(spans), batch.labels[0].split(spans), strict=True)
    return torch.cat([labelled(lm(input_ids=row[None], use_cache=False).logits[0], y) for row, y in rows])


@pytest.mark.parametrize("name", MODELS)
def test_logps_and_gradients_equal_eager_attention_on_whole_sequences(name: str, store: TokenStore) -> None:
    ours, theirs = model(name, ATTENTION), model(name, "eager")
    batch = pack(store, shared=True)
    got, expected = logps(ours, batch), oracle(theirs, pack(store, shared=False))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for values in (got, expected):
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
    for (parameter, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), parameter


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_left_out_is_seen(name: str, store: TokenStore) -> None:
    """Without the prefix the log-probabilities differ, so the comparison above can fail."""
    lm, batch = model(name, ATTENTION), pack(store, shared=True)
    alone = replace(batch, prefix_lengths=None, num_keys=None)
    assert (logps(lm, alone) - logps(lm, batch)).abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 5])
def test_the_cuda_kernel_sees_the_prefix(window: int | None, store: TokenStore) -> None:
    batch, g = pack(store, shared=True), torch.Generator().manual_seed(0)
    total = batch.labels.numel()
    inputs = [torch.randn(1, heads, total, 64, generator=g) for heads in (4, 2, 2)]
    expected, _ = attention(
        nn.Identity(), *inputs, None, sliding_window=window, **attention_kwargs(batch, sequence_spans(batch))
    )
    on_gpu = [tensor.cuda().bfloat16().requires_grad_() for tensor in inputs]
    options = attention_kwargs(batch.to(torch.device("cuda")), sequence_spans(batch))
    got, _ = attention(nn.Identity(), *on_gpu, None, sliding_window=window, **options)
    torch.testing.assert_close(got.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    got.float().square().sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in on_gpu)


def test_the_prompt_is_computed_once(store: TokenStore) -> None:
    shared, whole = pack(store, shared=True), pack(store, shared=False)
    assert shared_lengths(store).tolist() == [8, 0, 3, 1, 13]
    assert shared.prefix_lengths is not None
    assert whole.prefix_lengths is None
    assert whole.labels.numel() - shared.labels.numel() == shared.prefix_lengths.sum() == 8 + 3 + 1 + 13
    assert shared.num_keys == whole.labels.numel()
    assert shared.max_seqlen == whole.max_seqlen == 17


def test_stats_are_of_the_samples_and_the_cost_is_of_the_work(store: TokenStore) -> None:
    found = {}
    for shared in (False, True):
        plans = ListedPlans([plan_pairs(store, shared=shared, max_length=512)])
        loader = TokenDataLoader(
            store, plans, BatchShard(1, 1), Collation(True, 0), drop_last=False, num_steps=1
        )
        stats, [batch] = loader.stats(0), loader.microbatches(0)
        assert stats.num_computed_tokens == batch.labels.numel()
        # The query at position p has p + 1 keys; 2 (p + 1) - 1 adds up to the squared length of a sequence.
        assert stats.sum_squared_seqlens == (2 * batch.position_ids + 1).sum()
        found[shared] = replace(stats, num_computed_tokens=0, sum_squared_seqlens=0)
    assert found[False] == found[True]
    assert found[True].num_samples == len(PAIRS)


def test_rows_are_filled_with_what_is_computed(store: TokenStore) -> None:
    """The pair of 14 + 3 and 14 + 1 tokens fits into a row of 2 x 10, since its prompt is there only once."""
    lengths, shared = store.lengths[8:], shared_lengths(store)[4:]
    options = PlanOptions("bfd", max_length=10, shuffle=False)
    plan = plan_epoch(lengths, options, epoch=0, sequences_per_sample=2, shared=shared)
    assert plan.segments.tolist() == [[0, 0, 17], [1, 13, 15]]
    with pytest.raises(AssertionError):
        plan_epoch(lengths, options, epoch=0, sequences_per_sample=2)


@pytest.mark.parametrize(
    ("sequences", "masks", "shared"),
    [
        (([1, 2, 3, 4], [1, 2, 3, 5]), ([0, 0, 0, 1], [0, 0, 0, 1]), 2),
        # The common beginning of the answers is not shared.
        (([1, 2, 3, 4], [1, 2, 3, 5]), ([0, 0, 1, 1], [0, 0, 1, 1]), 1),
        (([1, 2, 3, 4], [1, 2, 3, 5]), ([0, 0, 0, 1], [0, 1, 1, 1]), 0),
        # Prompts that are cut differently or have one token are not shared.
        (([1, 2, 3, 4], [2, 3, 4, 5]), ([0, 0, 0, 1], [0, 0, 0, 1]), 0),
        (([1, 2], [1, 3]), ([0, 1], [0, 1]), 0),
        # If the prompts differ, their common beginning is shared.
        (([1, 2, 3, 4], [1, 2, 9, 5, 6]), ([0, 0, 0, 1], [0, 0, 0, 1, 1]), 1),
        # One sequence is the beginning of the other.
        (([1, 2, 3], [1, 2, 3, 4]), ([0, 0, 1], [0, 0, 0, 1]), 1),
    ],
)
def test_what_is_shared(
    sequences: tuple[list[int], ...], masks: tuple[list[int], ...], shared: int, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "s", [*sequences], [*masks], per_sample=2)
    assert shared_lengths(store).tolist() == [shared]
