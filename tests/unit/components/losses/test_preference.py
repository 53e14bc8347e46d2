"""DPO equals an independent implementation of the published formula in plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import ConfigError
from components.contracts.loss import TokenStats
from components.losses import DPO

LENGTHS = (5, 8, 3, 6, 4, 7)
PAIRS = [0, 1, 2, 3, 4, 5]
SHUFFLED = [4, 0, 3, 1, 5, 2]
WITH_A_STRANGER = [2, 0, -1, 1, 3, -1]
ORDERS = {"in order": PAIRS, "shuffled": SHUFFLED, "with others": WITH_A_STRANGER}


def rows() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return ``(labels, logps, ref_logps)`` of every sequence; the first two positions are the prompt."""
    g = torch.Generator().manual_seed(0)
    made = []
    for length in LENGTHS:
        labels = torch.randint(0, 9, (length,), generator=g)
        labels[:2] = IGNORE
        keep = labels != IGNORE
        logps, ref = (-3 * torch.rand(length, generator=g) * keep for _ in range(2))
        made.append((labels, logps, ref))
    return made


def packed(columns: Sequence[Sequence[Tensor]]) -> tuple[Batch, Tensor, Tensor]:
    labels, logps, ref = (torch.cat(list(column))[None] for column in columns)
    seqlens = torch.tensor(LENGTHS, dtype=torch.int32)
    ends = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return Batch(labels, labels, labels, seqlens, ends, max(LENGTHS)), logps, ref


def padded(columns: Sequence[Sequence[Tensor]]) -> tuple[Batch, Tensor, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    values = (IGNORE, 0.0, 0.0)
    labels, logps, ref = (
        pad(list(column), batch_first=True, padding_value=value)
        for column, value in zip(columns, values, strict=True)
    )
    return Batch(labels, labels, labels, torch.tensor(LENGTHS, dtype=torch.int32)), logps, ref


LAYOUTS = {"packed": packed, "padded": padded}


def make(layout: str, pair_index: list[int]) -> tuple[Batch, Tensor]:
    batch, logps, ref = LAYOUTS[layout](list(zip(*rows(), strict=True)))
    return replace(batch, pair_index=torch.tensor(pair_index), ref_logps=ref), logps.requires_grad_()


def empty() -> Batch:
    labels = torch.full((1, 1), IGNORE)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return Batch(
        *(labels, labels, labels, ends[:1], ends, 1),
        pair_index=torch.tensor([-1]),
        ref_logps=torch.zeros(1, 1),
    )


def oracle(pair_index: list[int], beta: float, eps: float) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return the sum, the gradient of every sequence's logps, and metric sums, pair by pair in float64."""
    data = rows()
    logps = [row[1].double().requires_grad_() for row in data]
    losses, chosen, rejected, sums = [], [], [], []
    for pair in range(sum(index >= 0 for index in pair_index) // 2):
        plus, minus = pair_index.index(2 * pair), pair_index.index(2 * pair + 1)
        policy = logps[plus].sum() - logps[minus].sum()
        reference = data[plus][2].double().sum() - data[minus][2].double().sum()
        logits = policy - reference
        sums += [(logps[plus].sum(), logps[minus].sum())]
        losses.append(-F.logsigmoid(beta * logits) * (1 - eps) - F.logsigmoid(-beta * logits) * eps)
        chosen.append(beta * (logps[plus].sum() - data[plus][2].double().sum()))
        rejected.append(beta * (logps[minus].sum() - data[minus][2].double().sum()))
    total = torch.stack(losses).sum()
    total.backward()
    a, b = torch.stack(chosen), torch.stack(rejected)
    metrics = {
        "rewards/chosen": a.sum(),
        "rewards/rejected": b.sum(),
        "rewards/margins": (a - b).sum(),
        "rewards/accuracies": (a > b).sum().double(),
        "logps/chosen": torch.stack([one for one, _ in sums]).sum(),
        "logps/rejected": torch.stack([one for _, one in sums]).sum(),
    }
    grads = [torch.zeros_like(row) if row.grad is None else row.grad for row in logps]
    return total.detach(), grads, {name: value.detach() for name, value in metrics.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("beta", "eps"), [(0.1, 0.0), (0.5, 0.2)])
def test_loss_gradient_and_metrics_equal_the_formula(
    layout: str, order: str, beta: float, eps: float
) -> None:
    pair_index = ORDERS[order]
    loss, (batch, logps) = DPO(beta=beta, label_smoothing=eps), make(layout, pair_index)
    output = loss(TokenStats(logps), batch)
    expected, grads, metrics = oracle(pair_index, beta, eps)
    pairs = sum(index >= 0 for index in pair_index) // 2
    assert loss.counts(batch) == {"loss": pairs}
    torch.testing.assert_close(output.terms["loss"], expected, rtol=1e-6, atol=0)
    output.terms["loss"].backward()
    got = logps.grad[0].split(LENGTHS) if layout == "packed" else logps.grad
    for length, ours, theirs in zip(LENGTHS, got, grads, strict=True):
        torch.testing.assert_close(ours[:length], theirs.float(), rtol=1e-5, atol=1e-7)
    assert output.metrics.keys() == metrics.keys()
    for name, (value, count) in output.metrics.items():
        assert count == pairs
        assert not value.requires_grad
        torch.testing.assert_close(value, metrics[name], rtol=1e-5, atol=1e-6)


def test_log_ratios_do_not_drown_in_long_sums() -> None:
    """Sums of about -2.5e6 keep their difference of 1e-2, which float32 sums would lose."""
    length = 50_000
    labels = torch.zeros(2, length, dtype=torch.int64)
    ref = torch.full((2, length), -50.0)
    logps = ref.clone()
    logps[0, :64] += 2**-12
    batch = Batch(
        labels, labels, labels, torch.tensor([length, length]), pair_index=torch.tensor([0, 1]), ref_logps=ref
    )
    margin, _ = DPO(beta=1.0)(TokenStats(logps), batch).metrics["rewards/margins"]
    assert margin.item() == pytest.approx(64 * 2**-12, rel=1e-6)


def test_equal_answers_are_not_accurate() -> None:
    batch, _ = make("packed", PAIRS)
    assert batch.ref_logps is not None
    output = DPO(beta=0.1)(TokenStats(batch.ref_logps.clone()), batch)
    assert output.terms["loss"].item() == pytest.approx(3 * torch.tensor(2.0).log().item())
    assert output.metrics["rewards/accuracies"] == (0, 3)


def test_an_empty_microbatch_adds_nothing() -> None:
    loss, batch = DPO(beta=0.1), empty()
    logps = torch.zeros(1, 1, requires_grad=True)
    output = loss(TokenStats(logps * 1), batch)
    output.terms["loss"].backward()
    assert output.terms["loss"].item() == 0
    assert loss.counts(batch) == {"loss": 0}
    assert all(value.item() == 0 and count == 0 for value, count in output.metrics.values())
    assert logps.grad is not None
    assert not logps.grad.any()


@pytest.mark.parametrize(
    "pair_index", [[0, 1, 2, -1, -1, -1], [1, 2, -1, -1, -1, -1], [0, 3, -1, -1, -1, -1]]
)
def test_half_a_pair_is_an_error(pair_index: list[int]) -> None:
    batch, logps = make("packed", pair_index)
    with pytest.raises(AssertionError, match="split"):
        DPO(beta=0.1)(TokenStats(logps), batch)


class FakeEngine:
    """A fake engine that returns reference log-probabilities, or None as off the last pipeline stage."""

    def __init__(self, answer: Callable[[Batch], Tensor] | None) -> None:
        self.answer = answer

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:
        assert reference
        return None if self.answer is None else [self.answer(batch) for batch in microbatches]


def test_prepare_attaches_the_reference() -> None:
    batches = [replace(make("packed", PAIRS)[0], ref_logps=None), replace(empty(), ref_logps=None)]
    engine = FakeEngine(lambda batch: torch.full(batch.labels.shape, -2.0))
    prepared = DPO(beta=0.1).prepare(batches, engine)  # type: ignore[arg-type]
    assert [bool((b.ref_logps == -2).all()) for b in prepared] == [True, True]
    assert all(batch.ref_logps is None for batch in batches)
    elsewhere = DPO(beta=0.1).prepare(batches, FakeEngine(None))  # type: ignore[arg-type]
    assert all(batch.ref_logps is None for batch in elsewhere)


def test_without_prepare_there_is_no_loss() -> None:
    batch, logps = make("packed", PAIRS)
    with pytest.raises(AssertionError, match="prepare"):
        DPO(beta=0.1)(TokenStats(logps), replace(batch, ref_logps=None))


REFUSED = [
    ("stage.beta", 0.0, 0.0),
    ("stage.beta", -1.0, 0.0),
    ("stage.beta", float("nan"), 0.0),
    ("stage.label_smoothing", 0.1, 0.5),
    ("stage.label_smoothing", 0.1, -0.1),
]


@pytest.mark.parametrize(("option", "beta", "eps"), REFUSED)
def test_values_that_make_no_sense_are_refused(option: str, beta: float, eps: float) -> None:
    with pytest.raises(ConfigError, match=option):
        DPO(beta=beta, label_smoothing=eps)
