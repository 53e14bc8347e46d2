"""Checks of the names of evaluation metrics before a run, with an empty micro-batch."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.data import PAIRS
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


def metric_names(loss: Loss) -> list[str]:
    """Return the names of the metrics that evaluations with ``loss`` report, without their set."""
    empty = Batch.empty(0, pairs=loss.kind in PAIRS, unpaired=loss.kind == "unpaired")
    (batch,) = loss.prepare([empty], NoModel())
    zeros = torch.zeros(batch.labels.shape)
    output = loss(TokenStats(zeros, **dict.fromkeys(loss.requires, zeros)), batch)
    return list(dict.fromkeys(("loss", *list(output.terms)[1:], *output.metrics)))


def evaluation_set(metric: str, names: Collection[str]) -> str | None:
    """Return the evaluation set of ``metric``: ``eval``, which stands for all, or ``eval/NAME``.

    Names of metrics may have slashes, and those of sets have none. None means that no metric of ``names`` is
    meant.
    """
    for name in sorted(names, key=len, reverse=True):
        found = metric.removesuffix(f"/{name}")
        if found != metric and found.split("/")[0] == "eval" and found.count("/") < 2:
            return found
    return None


def check_watched_metric(metric: str, loss: Loss, key: str) -> None:
    """Raise ConfigError, naming ``key``, if evaluations with ``loss`` do not report ``metric``.

    ``metric`` may be that of a named evaluation set, such as ``eval/NAME/loss``. Names of sets are checked
    later, when the data has been read.
    """
    names = metric_names(loss)
    if evaluation_set(metric, names) is None:
        known = ", ".join(f"eval/{name}" for name in names)
        raise ConfigError(
            f"{key}: evaluations do not report {metric!r}; use one of {known}. For a named set of "
            f"data.eval, use eval/NAME/{names[0]}."
        )


def check_watched_set(metric: str, loss: Loss, sets: Collection[str], key: str) -> None:
    """Raise ConfigError, naming ``key``, if ``metric`` belongs to an evaluation set not in ``sets``."""
    if evaluation_set(metric, metric_names(loss)) not in ("eval", *sets):
        known = dict.fromkeys(("eval", *sets))
        raise ConfigError(
            f"{key}: {metric!r} is of an evaluation set that data.eval does not name; use a metric of "
            f"{', '.join(known)}."
        )
