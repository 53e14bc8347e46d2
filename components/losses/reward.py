"""The loss of a reward model, which compares the scores of the two answers of a pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.errors import check_at_least_zero
from components.contracts.loss import LossEngine, LossOutput, ReferenceChoice, TokenStats
from components.losses.preference_base import pair_indices, sides


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The negative log-likelihood of the preferences in the model of Bradley and Terry (1952).

    It is ``-logsigmoid(chosen - rejected - margin)`` (Touvron et al. 2023, equation 2). The margin is that of
    the record, or 0 if the record has none. The score of an answer is the output of a scalar head at its last
    token. Preferences determine scores only up to a constant for each prompt; the additional term
    ``center_rewards_coefficient * (chosen + rejected) ** 2`` keeps them near 0 (Eisenstein et al. 2023,
    section 2). ``accuracy``, ``margin`` and ``mean_reward`` are named as in TRL's RewardTrainer.
    """

    center_rewards_coefficient: float = 0.0

    kind: ClassVar[Literal["ranked"]] = "ranked"
    requires: ClassVar[frozenset[str]] = frozenset({"values"})
    reference: ClassVar[ReferenceChoice] = "none"

    def __post_init__(self) -> None:
        check_at_least_zero("stage", self, "center_rewards_coefficient")

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": len(pair_indices(batch)[0])}

    def weights(self, batch: Batch) -> Tensor | None:  # noqa: ARG002
        return None

    def prepare(self, microbatches: Sequence[Batch], engine: LossEngine) -> Sequence[Batch]:  # noqa: ARG002
        return microbatches

    def __call__(self, stats: TokenStats, batch: Batch) -> LossOutput:
        assert stats.values is not None, "the engine computes what the loss requires"
        scores = stats.values.reshape(-1)[batch.scored_positions()].double()
        chosen, rejected = sides(scores, batch)
        margins = chosen - rejected
        loss = -F.logsigmoid(margins if batch.margins is None else margins - sides(batch.margins, batch)[0])
        if self.center_rewards_coefficient:
            loss = loss + self.center_rewards_coefficient * (chosen + rejected).square()
        metrics = {
            "accuracy": (margins > 0).double(),
            "margin": margins,
            "mean_reward": (chosen + rejected) / 2,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
        }
        return LossOutput(
            {"loss": loss.sum()}, {k: (v.detach().sum(), v.numel()) for k, v in metrics.items()}
        )
