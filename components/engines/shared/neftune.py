"""NEFTune (Jain et al. 2023): uniform noise on the embeddings of train steps, the same in every layout.

The noise of a token is a function of ``run.seed``, the step, the sequence, the position in the sequence and
the channel, so it does not depend on the number of ranks or on the micro-batches. Its absolute value is at
most ``alpha / sqrt(L * H)`` for a sequence of L tokens and H channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.contracts.batch import Batch

CHUNK = 1 << 20
"""Number of noise values that are computed at once, as 64-bit integers."""
MASK = (1 << 32) - 1


def scramble(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 32-bit integers in an int64 tensor (lowbias32 of Chris Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


@dataclass(frozen=True)
class NEFTune:
    alpha: float
    seed: int

    def noise_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the hash key (int64) and the bound of the noise times sqrt(H) (float32) of every position.

        Both have the shape of ``labels``. The bound is that of the absolute value, and is 0 on padding.
        """
        assert batch.sequence_keys is not None, "the data loader numbers the sequences"
        keys = batch.sequence_keys + self.seed
        keys = scramble(scramble(keys & MASK) ^ (keys >> 32 & MASK))
        ids = batch.real_sequence_ids()
        lengths = batch.seqlens.clamp(min=1).float()
        spread = torch.where(ids >= 0, self.alpha / lengths.sqrt()[ids], 0.0)
        return scramble(keys[ids] ^ batch.position_ids), spread


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
