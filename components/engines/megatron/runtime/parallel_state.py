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


def coordinates() -> dict[str, int]:
    """Return this rank's coordinates in the mesh, outermost dimension first."""
    return {
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "tp": parallel_state.get_tensor_model_parallel_rank(),
    }


def group_sizes() -> dict[str, int]:
    return {
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
    }


def gather_mesh_info(layout: Layout) -> Json:
    """Return the size of every dimension and the global rank at every coordinate; collective.

    If experts are distributed or split, ``experts`` holds the same for their mesh.
    """
    found = gather_ranks(coordinates(), group_sizes())
    if layout.ep == layout.etp == 1:
        return found
    pp = parallel_state.get_pipeline_model_parallel_rank()
    groups = {
        "dp": parallel_state.get_expert_data_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
    }
    here = {"pp": pp} | {name: group.rank() for name, group in groups.items()}
    shape = {"pp": layout.pp} | {name: group.size() for name, group in groups.items()}
    return found | {"experts": gather_ranks(here, shape)}


def gather_ranks(here: dict[str, int], sizes: dict[str, int]) -> Json:
    """Return the mesh of shape ``sizes`` in which each rank is at its coordinates ``here``; collective."""
    places: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(places, tuple(here.values()))
    ranks = torch.full(tuple(sizes.values()), -1)
    for rank, place in enumerate(places):
        assert ranks[place] == -1, f"ranks {ranks[place]} and {rank} are both at {place}"
        ranks[place] = rank
    return {"dims": sizes, "ranks": ranks.tolist()}


def same_microbatch_group() -> dist.ProcessGroup:
    """Return the ranks of this pipeline stage that process different tokens of the same micro-batches."""
    return parallel_state.get_tensor_and_context_parallel_group()


def same_batch_group() -> dist.ProcessGroup:
    """Return the ranks of this pipeline stage that process different tokens of the same global batch."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def from_last_stage(value: T | None, device: torch.device) -> T:
    """Return the value that the last stage of this pipeline passes; the others pass None. Collective."""
    box = [value]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(box, src=last, group=group, device=device)
    assert box[0] is not None
    return box[0]


def random_stream() -> int:
    """Return the number of this rank's random stream, the same on tp ranks and different on all others."""
    here, size = coordinates(), group_sizes()
    return (here["pp"] * size["dp"] + here["dp"]) * size["cp"] + here["cp"]
