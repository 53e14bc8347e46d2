"""Losses over pairs of answers, one chosen and one rejected, against a frozen reference model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from runner.errors import ConfigError
from runner.protocols import Batch, Engine, LossOutput, TokenStats


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7).

    With r = beta * (log-probability of an answer - the reference's) and m = r_chosen - r_rejected, a pair
    costs ``-(1 - eps) * logsigmoid(m) - eps * logsigmoid(-m)``; eps > 0 is conservative DPO (Mitchell 2023):
    a share eps of the preferences is taken to be the wrong way round.
    """

    beta: float
    label_smoothing: float

    kind: ClassVar[Literal["preference"]] = "preference"
    requires: ClassVar[frozenset[str]] = frozenset()
    needs_reference: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"stage.beta: must be a number above 0, got {self.beta}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"stage.label_smoothing: must be at least 0 and below 0.5 (at 0.5 nothing is preferred), "
                f"got {self.label_smoothing}."
            )

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": len(pairs(batch)[0])}

    def weights(self, batch: Batch) -> Tensor | None:  # noqa: ARG002
        return None

    def prepare(self, microbatches: Sequence[Batch], engine: Engine) -> Sequence[Batch]:
        logps = engine.logps(microbatches, reference=True)
        if logps is None:
            return microbatches
        return [replace(batch, ref_logps=ref) for batch, ref in zip(microbatches, logps, strict=True)]

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        assert batch.ref_logps is not None, "prepare() attaches the reference's log-probabilities"
        # Differenced by token, then summed: two sums over an answer are large and nearly equal.
        log_ratios = batch.sum_per_sequence(stats.logps - batch.ref_logps)
        sides = (side.to(log_ratios.device, non_blocking=True) for side in pairs(batch))
        chosen, rejected = (self.beta * log_ratios[side] for side in sides)
        margin, eps = chosen - rejected, self.label_smoothing
        loss = -(1 - eps) * F.logsigmoid(margin) - eps * F.logsigmoid(-margin)
        metrics = {
            "rewards_chosen": chosen,
            "rewards_rejected": rejected,
            "rewards_margin": margin,
            "accuracy": (margin > 0).double(),
        }
        count = margin.numel()
        return LossOutput({"loss": loss.sum()}, {k: (v.detach().sum(), count) for k, v in metrics.items()})


def pairs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Indices of the chosen and of the rejected sequences, pair by pair: int64 ``[pairs]`` each."""
    assert batch.pair_index is not None, "preference data carries pair_index"
    order = batch.pair_index.argsort()
    order = order[batch.pair_index[order] >= 0]
    chosen, rejected = order[0::2], order[1::2]
    ids = batch.pair_index[order].tolist()
    whole = all(index % 2 == 0 for index in ids[0::2]) and [i + 1 for i in ids[0::2]] == ids[1::2]
    assert whole, f"a pair is split over micro-batches: {ids}"
    return chosen, rejected
