"""The number of layers that ``activation_checkpointing`` recomputes in the backward pass."""

from collections.abc import Mapping, Sequence

from components.contracts.errors import ConfigError

RECOMPUTED_MORE: Mapping[str, tuple[str, ...]] = {
    "none": ("selective", "full"),
    "selective": ("full",),
    "full": (),
}
"""For each value of activation_checkpointing, the values that recompute more."""


def recomputed_share(how: str, first: int | None, chunks: Sequence[int]) -> float:
    """Return the share of layers that are recomputed as a whole: the first ``first`` of every chunk.

    None means all layers. The share is 0 unless ``how`` is ``full``. ``chunks`` are the numbers of layers of
    the pipeline's model chunks; a model without pipelining is one chunk.
    """
    if how != "full":
        return 0.0
    return 1.0 if first is None else sum(min(number, first) for number in chunks) / sum(chunks)


def check_recomputed(how: str, first: int | None, num_layers: int) -> None:
    """Check ``parallelism.recompute_num_layers=first`` for ``num_layers`` layers of the model or of a chunk.

    Raises:
        ConfigError: if ``first`` is given and ``how`` is not ``full``, or ``first`` is not 1 to
            ``num_layers``.
    """
    if first is None:
        return
    if how != "full":
        raise ConfigError(
            f"parallelism.recompute_num_layers: {first} is not read with activation_checkpointing={how}; "
            "set parallelism.activation_checkpointing=full, or leave it out."
        )
    if not 1 <= first <= num_layers:
        raise ConfigError(
            f"parallelism.recompute_num_layers: is {first}, but there are {num_layers} layers; use 1 to "
            f"{num_layers}, or null for all."
        )
