"""NEFTune (Jain et al. 2023): uniform noise on the embeddings of train steps, the same in every layout.

The noise is a function of the sequence, the position (see ``token_hash.py``) and the channel. Its absolute
value is at most ``alpha / sqrt(L * H)`` for a sequence of L tokens and H channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.contracts.batch import Batch
from components.engines.shared.token_hash import scramble, token_hashes

CHUNK = 1 << 20
"""Number of noise values that are computed at once, as 64-bit integers."""


@dataclass(frozen=True)
class NEFTune:
    alpha: float
    seed: int

    def noise_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hash key (int64) of every position, and its bound of |noise| * sqrt(H) (float32).

        Both have the shape of ``labels``. The bound is 0 on padding.
        """
        ids = batch.real_sequence_ids()
        lengths = batch.seqlens.clamp(min=1).float()
        spread = torch.where(ids >= 0, self.alpha / lengths.sqrt()[ids], 0.0)
        return token_hashes(batch, self.seed), spread


NO_NOISE = NEFTune(0.0, 0)


class NoisyEmbedding:
    """A forward hook of an embedding layer that adds noise to the output of the layer's next call."""

    def __init__(self) -> None:
        self.given: tuple[Tensor, Tensor] | None = None
        """Keys and bounds from ``NEFTune.noise_of``, in the order of the output. None means no noise."""

    def __call__(self, _module: nn.Module, _inputs: object, embedded: Tensor) -> Tensor:
        if self.given is None:
            return embedded
        (keys, spread), self.given = self.given, None  # a further call embeds tokens of another MTP depth
        return embedded + noise(keys.reshape(-1), spread.reshape(-1), embedded).view_as(embedded)


def noise(keys: Tensor, spread: Tensor, like: Tensor) -> Tensor:
    """Return the noise of every position, ``[n, H]`` in the dtype of ``like``, whose last dimension is H."""
    width = like.shape[-1]
    channels = scramble(torch.arange(width, device=keys.device))
    made = like.new_empty(len(keys), width)
    for first in range(0, len(keys), max(CHUNK // width, 1)):
        some = slice(first, first + max(CHUNK // width, 1))
        whole = scramble(keys[some, None] ^ channels) >> 8
        uniform = (2 * whole + 1).float() / (1 << 24) - 1
        made[some] = uniform * (spread[some, None] / math.sqrt(width))
    return made
