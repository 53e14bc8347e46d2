"""Random numbers that are functions of a token's sequence and position, so that every layout has the same."""

from torch import Tensor

from components.contracts.batch import Batch
from components.contracts.errors import ConfigError

MASK = (1 << 32) - 1


def scramble(x: Tensor) -> Tensor:
    """Return a 32-bit hash of 32-bit integers in an int64 tensor (lowbias32 of Chris Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def token_hashes(batch: Batch, seed: int) -> Tensor:
    """Return a 32-bit hash of every position, int64 in the shape of ``labels``.

    It is a function of ``seed``, the step, the sequence and the position in the sequence, so it does not
    depend on the number of ranks or on the micro-batches. Hashes of padding have no meaning.

    Raises:
        ConfigError: if the batch has no ``sequence_keys``, or sequences that share a prompt.
    """
    if batch.sequence_keys is None or batch.prefix_lengths is not None:
        raise ConfigError(
            "Batch.sequence_keys: model.neftune_alpha and adapter.dropout need a key for each sequence, "
            "which differs in every step, and no shared prompts; set such keys, and leave out prefix_lengths."
        )
    keys = batch.sequence_keys + seed
    keys = scramble(scramble(keys & MASK) ^ (keys >> 32 & MASK))
    return scramble(keys[batch.real_sequence_ids()] ^ batch.position_ids)
