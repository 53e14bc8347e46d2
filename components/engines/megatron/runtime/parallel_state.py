"""Megatron's process groups, which assign parts of the model and of the data to ranks."""

from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from components.contracts.json_types import Json
from components.engines.megatron.layout import Layout

T = TypeVar("T")


def initialize_groups(layout: Layout) -> None:
    """Split the default process group according to ``layout``; every rank must call it."""
    parallel_state.destroy_model_parallel()  # left over from a failed build
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )


def mesh_groups() -> dict[str, dist.ProcessGroup]:
    """Return this rank's group in each dimension of the mesh, outermost dimension first."""
    return {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "tp": parallel_state.get_tensor_model_parallel_group(),
    }


def gather_mesh_info(layout: Layout) -> Json:
    """Return the size of every dimension and the global rank at every coordinate; collective.

    If experts are distributed or split, ``experts`` holds the same for their mesh.
    """
    found = gather_ranks(mesh_groups())
    if layout.ep == layout.etp == 1:
        return found
    groups = {
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "dp": parallel_state.get_expert_data_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
    }
    return found | {"experts": gather_ranks(groups)}


def gather_ranks(groups: dict[str, dist.ProcessGroup]) -> Json:
    """Return the mesh whose dimensions are ``groups``, with every rank at its coordinates; collective."""
    sizes = {name: group.size() for name, group in groups.items()}
    places: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(places, tuple(group.rank() for group in groups.values()))
    ranks = torch.full(tuple(sizes.values()), -1)
    for rank, place in enumerate(places):
        assert ranks[place] == -1, f"ranks {ranks[place]} and {rank} are both at {place}"
        ranks[place] = rank
    return {"dims": sizes, "ranks": ranks.tolist()}


def from_last_stage(value: T | None, device: torch.device) -> T:
    """Return the ``value`` of the last pipeline stage on all stages; collective.

    The other stages pass None.
    """
    box = [value]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(box, src=last, group=group, device=device)
    assert box[0] is not None
    return box[0]


def random_stream() -> int:
    """Return the number of this rank's random stream, which only the ranks of its tp group share."""
    pp, dp, cp, _ = mesh_groups().values()
    return (pp.rank() * dp.size() + dp.rank()) * cp.size() + cp.rank()
