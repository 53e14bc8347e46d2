"""Names of the metrics of an evaluation, known before the run from an empty micro-batch."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from components.contracts.batch import IGNORE, Batch
from components.contracts.data import PAIRS, SampleKind
from components.contracts.errors import ConfigError
from components.contracts.loss import Loss, TokenStats


class NoModel:
    """A ``LossEngine`` without a model, in one process.

    All log-probabilities are 0, and sums over data ranks are the values of this process.
    """

    def logps(self, microbatches: Sequence[Batch], *, reference: bool = False) -> list[Tensor] | None:  # noqa: ARG002
        return [torch.zeros(batch.labels.shape) for batch in microbatches]

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        return list(values)


def check_watched_metric(metric: str, loss: Loss, key: str) -> None:
    """Raise ConfigError, naming ``key``, if evaluations with ``loss`` do not report ``metric``.

    It may be that of a named evaluation set, ``eval/NAME/loss``; the names are checked once data is read.
    """
    (batch,) = loss.prepare([empty_batch(loss.kind)], NoModel())
    zeros = torch.zeros(batch.labels.shape)
    output = loss(TokenStats(zeros, **dict.fromkeys(loss.requires, zeros)), batch)
    known = [f"eval/{name}" for name in dict.fromkeys(("loss", *list(output.terms)[1:], *output.metrics))]
    first, _, last = metric.partition("/")
    if f"{first}/{last.rpartition('/')[2]}" not in known:
        raise ConfigError(f"{key}: evaluations do not report {metric!r}; use one of {', '.join(known)}.")


def check_watched_set(metric: str, sets: Collection[str], key: str) -> None:
    """Raise ConfigError, naming ``key``, if ``metric`` is of an evaluation set not among ``sets``."""
    of = metric.rpartition("/")[0]
    if of not in ("eval", *sets):
        known = dict.fromkeys(("eval", *sets))
        raise ConfigError(
            f"{key}: {metric!r} is of an evaluation set that data.eval does not name; use a metric of "
            f"{', '.join(known)}."
        )


def empty_batch(kind: SampleKind) -> Batch:
    """Return a packed micro-batch without a sample, which every loss accepts."""
    return Batch(
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        labels=torch.tensor([[IGNORE]]),
        position_ids=torch.zeros(1, 1, dtype=torch.int64),
        seqlens=torch.tensor([0], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        max_seqlen=1,
        pair_index=torch.tensor([-1]) if kind in PAIRS else None,
        sequence_labels=torch.tensor([-1]) if kind == "unpaired" else None,
        pad_id=0,
    )
