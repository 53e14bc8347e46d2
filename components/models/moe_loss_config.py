"""Load balancing loss, router z-loss and bias updates of MoE routers."""

from dataclasses import dataclass
from typing import Literal

from components.contracts.batch import Batch
from components.contracts.errors import check_at_least_zero

Balance = Literal["none", "switch", "sequence", "global_batch"]

AUX, Z = "aux_loss", "router_z_loss"
"""Names of the loss terms and of their counts."""


@dataclass(frozen=True)
class MoELossConfig:
    """Loss terms of the routers, each summed over layers.

    Each of T tokens is sent to K of E experts. With ``f_e = E / (K T) * #(tokens that chose e)`` and ``P_e``
    the mean over tokens of the normalised score of expert e, the load balancing loss of a layer is
    ``sum_e f_e P_e``, which is 1 if the load is even.
    """

    aux_loss: Balance = "none"
    """The tokens that T counts: with ``switch`` those of one micro-batch (Fedus et al., 2021, equation 4),
    with ``sequence`` those of one sequence (DeepSeek-V3, equation 17), with ``global_batch``, for ``f``,
    those of all micro-batches of the global batch so far (Qiu et al., 2025). Micro-batches are weighted by
    their numbers of tokens."""
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    """Coefficient of the router z-loss, the mean over tokens of ``logsumexp(router logits) ** 2`` (Zoph et
    al., 2022, equation 5)."""
    bias_update_rate: float = 0.0
    """Amount added to an expert's bias after an update if its load in the global batch was below the mean,
    and subtracted if it was above (Wang et al., 2024)."""

    def __post_init__(self) -> None:
        check_at_least_zero("model.moe", self, "aux_loss_coef", "z_loss_coef", "bias_update_rate")

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficients of the active loss terms, by name."""
        balance = self.aux_loss_coef if self.aux_loss != "none" else 0.0
        return {name: value for name, value in ((AUX, balance), (Z, self.z_loss_coef)) if value}

    @property
    def depends_on_microbatches(self) -> bool:
        return AUX in self.coefficients and self.aux_loss != "sequence"

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return the number of items over which each term is a mean: real tokens, or non-empty sequences."""
        tokens, sequences = int(batch.seqlens.sum()), int((batch.seqlens > 0).sum())
        counts = {AUX: sequences if self.aux_loss == "sequence" else tokens, Z: tokens}
        return {name: counts[name] for name in self.coefficients}
