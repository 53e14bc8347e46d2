"""Smaller layouts with the kinds of parallelism of a large one."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from itertools import combinations
from typing import Any

from components.contracts.errors import ConfigError
from components.contracts.parallelism import ParallelismSpec

MOST_RANKS = 8
DROPPED = ("dp", "default_dp", "etp", "cp", "dp_replicate", "ep", "pp", "tp")
"""Fields of a layout, including one of a user's own class, in the order in which they are set to 1 instead
of 2 if there would be too many ranks."""
SIZES = ("vpp", *DROPPED)
STAGES = ("pipeline_layout", "first_stage_layers", "last_stage_layers", "recompute_num_layers")
"""Fields with numbers of layers, which do not fit a model with another number of layers."""


def layout_sizes(layout: ParallelismSpec) -> dict[str, int]:
    """Return the value of each of ``SIZES`` in the layout, 1 if it has no such field."""
    return {name: getattr(layout, name, None) or 1 for name in SIZES}


def size_names(layout: ParallelismSpec) -> list[str]:
    """Return the sizes of the layout that are above 1, as in ``["tp2", "pp2", "dp2"]``."""
    found = layout_sizes(layout) | {"dp": layout.dp_size(layout.world_size({}, 0)), "default_dp": 1}
    return [f"{name}{size}" for name, size in reversed(found.items()) if size > 1]


def small_layouts(layout: ParallelismSpec) -> Iterator[ParallelismSpec]:
    """Yield ``layout`` if it has at most ``MOST_RANKS`` ranks, else smaller ones, most sizes above 1 first.

    Raises:
        ConfigError: if there is no smaller layout.
    """
    ranks, large, found = layout.world_size({}, 0), layout_sizes(layout), False
    if ranks <= MOST_RANKS:
        yield layout
        return
    split = [name for name in DROPPED if large[name] > 1]
    for left_out in (names for number in range(len(split)) for names in combinations(split, number)):
        wanted = {name: 1 if name in left_out else 2 for name in split}
        if "dp" in wanted and large["dp"] > large["dp_replicate"]:
            wanted["dp"] *= wanted.get("dp_replicate", 1)
        small = resized(layout, wanted)
        if small is not None and small.world_size({}, 0) <= MOST_RANKS:
            found = True
            yield small
    if not found:
        raise ConfigError(
            f"parallelism: has {ranks} ranks, a proof at most {MOST_RANKS}, and {type(layout).__name__} has "
            "no dataclass fields tp, pp, cp, ep or dp to make it smaller; compose a smaller layout."
        )


def resized(layout: Any, wanted: dict[str, int]) -> ParallelismSpec | None:
    """Return the layout with the sizes ``wanted`` and even stages. None means that its class refuses them."""
    if not is_dataclass(type(layout)):
        return None
    even = {name: None for name in STAGES if getattr(layout, name, None) is not None}
    try:
        return replace(layout, **wanted, **even)
    except ConfigError:
        return None
