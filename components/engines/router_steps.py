"""What routers add to the steps of an engine, whatever its layers are made of."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from components.engines.routers import Routers, bias_change, metrics


class RouterSteps(ABC):
    """The routers of this rank in one train step after another. Every rank has one."""

    def __init__(self, routers: Routers, *, drops: bool) -> None:
        self.routers, self.drops = routers, drops
        self.counts: Mapping[str, int] = {}
        """Global counts of the terms in this step."""
        self.loads: Tensor | None = None
        """Float64 ``[layers, E]`` of the step that was finished last."""

    def begin(self, counts: Mapping[str, int] | None) -> None:
        """``counts``: global, of the loss, its main term first, and of the terms; None: no terms."""
        strengths = self.routers.terms.strengths
        if counts is None:
            assert not strengths, "terms of routers need their counts at begin_train_step"
            counts = {"": 1}
        self.counts = {name: counts[name] for name in strengths}
        self.routers.begin(self.counts, next(iter(counts.values())))

    def finish(self, loss: float) -> tuple[float, dict[str, float]]:
        """``loss`` with the terms, and metrics; collective over all ranks of the run."""
        sums, loads = self.routers.finish()
        self.loads = loads[:, :-1]
        means = {name: total / max(self.counts[name], 1) for name, total in sums.items()}
        return loss + sum(means.values()), means | metrics(loads, drops=self.drops)

    def bias_change(self, layer: int) -> Tensor | None:
        """What a finished step that was not skipped adds to the biases ``[E]`` of a layer's router."""
        assert self.loads is not None, "biases follow the loads of a finished step"
        rate = self.routers.terms.bias_update_rate
        return bias_change(self.loads[layer], rate) if rate else None

    @abstractmethod
    def update_biases(self) -> None:
        """Apply ``bias_change`` to every router of this rank."""

    @abstractmethod
    def abort(self) -> None:
        """Forget the micro-batch under way."""
