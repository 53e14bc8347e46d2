"""The next-token loss equals torch's cross entropy, packed and padded."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.errors import ConfigError
from components.engines.shared.token_log_probs import token_stats
from components.losses import NextToken
from tests.chunked_stats import chunked_stats

V, H = 31, 8
LENGTHS = (6, 1, 9, 4)
LABELLED = (3, 1, 9, 0)


def loss_of(
    normalize: str = "token", label_smoothing: float = 0.0, z_loss: float = 0.0, kind: str = "chat"
) -> NextToken:
    return NextToken(kind=kind, normalize=normalize, label_smoothing=label_smoothing, z_loss=z_loss)  # type: ignore[arg-type]


def label_rows() -> list[Tensor]:
    """Return labels of rows, in which only the last ``LABELLED[i]`` of ``LENGTHS[i]`` positions have one."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for length, labelled in zip(LENGTHS, LABELLED, strict=True):
        row = torch.randint(0, V, (length,), generator=g)
        row[: length - labelled] = IGNORE
        rows.append(row)
    return rows


def packed(rows: list[Tensor]) -> Batch:
    labels, seqlens = torch.cat(rows)[None], torch.tensor([len(r) for r in rows], dtype=torch.int32)
    ends = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return Batch(labels.clamp(min=0), labels, torch.zeros_like(labels), seqlens, ends, int(seqlens.max()))


def padded(rows: list[Tensor]) -> Batch:
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORE)
    seqlens = torch.tensor([len(r) for r in rows], dtype=torch.int32)
    return Batch(labels.clamp(min=0), labels, torch.zeros_like(labels), seqlens)


def empty() -> Batch:
    labels = torch.full((1, 1), IGNORE)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    return Batch(torch.zeros(1, 1, dtype=torch.int64), labels, labels * 0, ends[:1], ends, 1)


def table() -> tuple[Tensor, Tensor]:
    """Return the embedding ``[V, H]`` and head ``[V, H]`` of the smallest language model."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(V, H, generator=g).requires_grad_(), torch.randn(V, H, generator=g).requires_grad_()


def run(loss: NextToken, batch: Batch) -> tuple[Tensor, int, list[Tensor]]:
    """Return ``(sum, count, gradients)``."""
    embedding, head = table()
    hidden = embedding[batch.input_ids]
    stats = chunked_stats(
        hidden, head, batch.labels, requires=loss.requires, weights=loss.weights(batch), chunk_size=5
    )
    total = loss(stats, batch).terms["loss"]
    total.backward()
    return total.detach(), loss.counts(batch)["loss"], [embedding.grad, head.grad]


def oracle(loss: NextToken, rows: list[Tensor]) -> tuple[Tensor, int, list[Tensor]]:
    embedding, head = table()
    total, count = torch.zeros(()), 0
    for labels in rows:
        logits = embedding[labels.clamp(min=0)] @ head.T
        nll = F.cross_entropy(logits, labels, label_smoothing=loss.label_smoothing, reduction="none")
        value = nll + loss.z_loss * logits.logsumexp(-1).square() * (labels != IGNORE)
        n = int((labels != IGNORE).sum())
        by_sequence = loss.normalize == "sequence"
        total = total + value.sum() / (max(n, 1) if by_sequence else 1)
        count += min(n, 1) if by_sequence else n
    total.backward()
    return total.detach(), count, [embedding.grad, head.grad]


@pytest.mark.parametrize("layout", [packed, padded])
@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)])
def test_sum_count_and_gradients_equal_torch(
    layout: Callable[[list[Tensor]], Batch], normalize: str, smoothing: float, z_loss: float
) -> None:
    loss, rows = loss_of(normalize, smoothing, z_loss), label_rows()
    total, count, grads = run(loss, layout(rows))
    expected, expected_count, expected_grads = oracle(loss, rows)
    torch.testing.assert_close(total.float(), expected, rtol=1e-5, atol=0)
    assert count == expected_count == (sum(LABELLED) if normalize == "token" else 3)
    for grad, true in zip(grads, expected_grads, strict=True):
        assert (grad - true).norm() <= 1e-5 * true.norm()


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 1e-2)])
def test_an_empty_microbatch_adds_nothing(normalize: str, smoothing: float, z_loss: float) -> None:
    total, count, grads = run(loss_of(normalize, smoothing, z_loss), empty())
    assert (total, count) == (0, 0)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("layout", [packed, padded])
def test_weights_say_what_the_loss_is(layout: Callable[[list[Tensor]], Batch], normalize: str) -> None:
    loss, batch = loss_of(normalize), layout(label_rows())
    embedding, head = table()
    stats = token_stats(embedding[batch.input_ids], head, batch.labels)
    weights = loss.weights(batch)
    assert weights is not None
    assert weights.dtype == torch.float32
    assert weights.shape == batch.labels.shape
    torch.testing.assert_close(-(weights * stats.logps).sum(), loss(stats, batch).terms["loss"].float())


REQUIRES = {
    (0.0, 0.0): (frozenset(), set()),
    (0.1, 0.0): (frozenset({"mean_logp"}), {"nll"}),
    (0.0, 0.1): (frozenset({"logsumexp"}), {"nll", "z_loss"}),
    (0.1, 0.1): (frozenset({"mean_logp", "logsumexp"}), {"nll", "z_loss"}),
}


@pytest.mark.parametrize(("smoothing", "z_loss"), REQUIRES)
def test_requires_and_metrics(smoothing: float, z_loss: float) -> None:
    loss, batch = loss_of("token", smoothing, z_loss), packed(label_rows())
    requires, names = REQUIRES[smoothing, z_loss]
    assert loss.requires == requires
    assert (loss.weights(batch) is None) == bool(requires)
    embedding, head = table()
    stats = token_stats(embedding[batch.input_ids], head, batch.labels, requires=requires)
    metrics = loss(stats, batch).metrics
    assert set(metrics) == names
    for name, (value, count) in metrics.items():
        assert not value.requires_grad
        assert count == sum(LABELLED)
        expected = -stats.logps if name == "nll" else z_loss * stats.logsumexp.square()
        torch.testing.assert_close(value.float(), expected.sum().detach())


def test_token_accuracy() -> None:
    """It is reported with a loss whose gradient the forward pass computes, and with one whose it does not."""
    batch, (embedding, head) = packed(label_rows()), table()
    top = (embedding[batch.input_ids] @ head.T).argmax(-1)
    labelled = batch.labels != IGNORE
    batch.labels[:, ::2] = torch.where(labelled, top, IGNORE)[:, ::2]
    for loss in (NextToken(token_accuracy=True), NextToken(token_accuracy=True, z_loss=0.1)):
        weights = loss.weights(batch)
        assert (weights is None) == bool(loss.z_loss)
        stats = token_stats(
            embedding[batch.input_ids], head, batch.labels, requires=loss.requires, weights=weights
        )
        correct, count = loss(stats, batch).metrics["token_accuracy"]
        assert count == sum(LABELLED)
        assert 0 < int(correct) == int((labelled & (batch.labels == top)).sum()) < count


REFUSED = [
    ("stage.label_smoothing", {"label_smoothing": 1.0}),
    ("stage.label_smoothing", {"label_smoothing": -0.1}),
    ("stage.label_smoothing", {"label_smoothing": float("nan")}),
    ("stage.z_loss", {"z_loss": -1.0}),
    ("stage.z_loss", {"z_loss": float("inf")}),
]


@pytest.mark.parametrize(("option", "values"), REFUSED)
def test_values_that_make_no_sense_are_refused(option: str, values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=option):
        loss_of(**values)  # type: ignore[arg-type]
