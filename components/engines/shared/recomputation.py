"""The layers and modules that ``activation_checkpointing`` recomputes in the backward pass."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from components.contracts.errors import ConfigError
from components.contracts.json_types import Json

RECOMPUTED_MORE: Mapping[str, tuple[str, ...]] = {
    "none": ("selective", "full"),
    "selective": ("full",),
    "full": (),
}
"""For each value of activation_checkpointing, the values that recompute more."""


Module = Literal["core_attn", "mlp", "moe"]
"""Parts of a block that ``selective`` can recompute, by Megatron's names: attention without its projections,
the MLP of a dense block, and the router with all experts of an MoE block."""


def recomputed_modules(how: str, modules: Sequence[Module] | None) -> tuple[Module, ...]:
    """Return the modules that are recomputed in every block, none unless ``how`` is ``selective``.

    If ``modules`` is None, only ``core_attn`` is recomputed.
    """
    if how != "selective":
        return ()
    return ("core_attn",) if modules is None else tuple(modules)


def recompute_more(how: str, modules: Sequence[Module] | None, first: int | None) -> list[Json]:
    """Return changes of the keys ``activation_checkpointing=how`` and so on that recompute more."""
    reset: Json = {} if modules is None else {"recompute_modules": None}
    found = [{"activation_checkpointing": kind} | reset for kind in RECOMPUTED_MORE[how]]
    return found if first is None else [*found, {"recompute_num_layers": None}]


def recomputed_share(how: str, first: int | None, chunks: Sequence[int]) -> float:
    """Return the share of layers that are recomputed as a whole: the first ``first`` of every chunk.

    If ``first`` is None, these are all layers. The share is 0 unless ``how`` is ``full``. ``chunks`` are the
    numbers of layers of the pipeline's model chunks; a model without pipelining is one chunk.
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


def check_modules(how: str, modules: Sequence[Module] | None, kinds: Collection[str]) -> None:
    """Check ``parallelism.recompute_modules`` for a model whose blocks have the ``kinds`` of MLP.

    ``kinds`` has ``mlp`` if a block is dense, and ``moe`` if one has experts.

    Raises:
        ConfigError: if ``modules`` is given and ``how`` is not ``selective``, or ``modules`` is empty, or has
            a name twice or the name of a kind that the model does not have.
    """
    if modules is None:
        return
    if how != "selective":
        raise ConfigError(
            f"parallelism.recompute_modules: [{','.join(modules)}] is not read with "
            f"activation_checkpointing={how}; set parallelism.activation_checkpointing=selective, or leave "
            "it out."
        )
    possible = ",".join(["core_attn", *sorted(kinds)])
    wrong = {
        "is empty": not modules,
        "has a name twice": len(set(modules)) < len(modules),
        **{
            f"has {name}, but no block of this model has such a module": name in modules and name not in kinds
            for name in ("mlp", "moe")
        },
    }
    for what, holds in wrong.items():
        if holds:
            raise ConfigError(
                f"parallelism.recompute_modules: {what}; use some of [{possible}], or null for [core_attn]."
            )
