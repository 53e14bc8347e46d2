"""What routers of experts add to the loss, and how they are kept in balance."""

import math
from dataclasses import dataclass
from typing import Literal

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError

Balance = Literal["none", "switch", "sequence", "global_batch"]

AUX, Z = "aux_loss", "router_z_loss"
"""Names of the terms, and of their counts."""


@dataclass(frozen=True)
class MoELossConfig:
    """With K of E experts chosen for each of T tokens, ``f_e = E / (K T) * #(tokens that chose e)`` and
    ``P_e`` the mean over tokens of their normalised score of e, a layer's balance loss is ``sum_e f_e P_e``:
    1 where the load is even. Terms are summed over layers.
    """

    aux_loss: Balance = "none"
    """Whose tokens T are: one micro-batch's (Fedus et al., 2021, equation 4), one sequence's (DeepSeek-V3,
    equation 17), or for ``f`` those of every micro-batch of the global batch so far (Qiu et al., 2025). A
    micro-batch weighs by its tokens."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    """Of the mean over tokens of ``logsumexp(router logits) ** 2`` (Zoph et al., 2022, equation 5)."""
    bias_update_rate: float = 0.0
    """After every update, by so much an expert's bias rises where its load was below the mean of the global
    batch, and falls where it was above (Wang et al., 2024)."""

    def __post_init__(self) -> None:
        for key in ("aux_loss_coef", "z_loss_coef", "bias_update_rate"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise ConfigError(f"model.moe.{key}: must be a number of at least 0, got {value}.")

    @property
    def coefficients(self) -> dict[str, float]:
        """Terms that the loss has, and their coefficients."""
        balance = self.aux_loss_coef if self.aux_loss != "none" else 0.0
        return {name: value for name, value in ((AUX, balance), (Z, self.z_loss_coef)) if value}

    def counts(self, batch: Batch) -> dict[str, int]:
        """What each term is a mean over: real tokens, or sequences that have any."""
        tokens, sequences = int(batch.seqlens.sum()), int((batch.seqlens > 0).sum())
        counts = {AUX: sequences if self.aux_loss == "sequence" else tokens, Z: tokens}
        return {name: counts[name] for name in self.coefficients}
