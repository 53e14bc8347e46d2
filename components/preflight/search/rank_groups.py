"""The global ranks of each process group of a layout."""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from components.contracts.json_types import Config, Json
from components.preflight.engine_layouts import EngineLayout, mesh_info


def groups(layout: EngineLayout, world_size: int) -> dict[str, list[list[int]]]:
    """Return the groups of each dimension with more than one rank, as lists of global ranks.

    ``dp x cp`` and ``dp_shard x cp`` are the ranks that reduce gradients and shard parameters if sequences
    are split. ``ep`` and ``etp`` group the same ranks by the experts that they hold, and ``dp of experts`` or
    ``dp_shard of experts`` are those that reduce the gradients of the same experts.
    """
    mesh = mesh_info(layout, world_size)
    dims: Mapping[str, int] = mesh["dims"]
    names = list(dims)
    wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    if dims.get("cp", 1) > 1:
        data = names[names.index("cp") - 1]
        wanted[f"{data} x cp"] = (data, "cp")
    found = {label: along(mesh, members) for label, members in wanted.items()}
    if experts := mesh.get("experts"):
        found |= {name: along(experts, (name,)) for name in ("ep", "etp") if name in experts["dims"]}
        data = next(name for name in ("dp", "dp_shard") if name in experts["dims"])
        found[f"{data} of experts"] = along(experts, (data,))
    return {label: members for label, members in found.items() if len(members[0]) > 1}


def along(mesh: Config, members: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that differ only in the dimensions ``members``."""
    dims: Mapping[str, int] = mesh["dims"]
    ranks, names = torch.tensor(mesh["ranks"]).view(*dims.values()), list(dims)
    last = [names.index(name) for name in members]
    first = [index for index in range(len(names)) if index not in last]
    size = math.prod(dims[name] for name in members)
    return ranks.permute(*first, *last).reshape(-1, size).tolist()


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ``0-7`` or ``0 8 .. 56`` (every eighth) if evenly spaced, otherwise as a full list."""
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 3 and len(steps) == 1:
        return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
    return " ".join(map(str, ranks))


def group_rows(layout: EngineLayout, world_size: int) -> list[Json]:
    """Return one row per group, for preflight.json."""
    return [
        {"dimension": label, "group": number, "size": len(ranks), "ranks": " ".join(map(str, ranks))}
        for label, members in groups(layout, world_size).items()
        for number, ranks in enumerate(members)
    ]


def group_lines(layout: EngineLayout, world_size: int) -> list[str]:
    """Return a text per dimension with its first and last group: ``tp 8: 0-7, ..., 504-511``."""
    texts = []
    for label, members in groups(layout, world_size).items():
        shown = [format_ranks(ranks) for ranks in dict.fromkeys((tuple(members[0]), tuple(members[-1])))]
        between = ", ..., " if len(members) > 2 else ", "
        texts.append(f"{label} {len(members[0])}: {between.join(shown)}")
    return texts
