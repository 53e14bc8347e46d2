"""Megatron's process groups: which rank has which part of the model and of the data."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from components.contracts.json_types import Json
from components.engines.megatron.layout import Layout

T = TypeVar("T")


def initialize_groups(layout: Layout) -> None:
    """Cuts the default process group as ``layout`` says; every rank calls it."""
    parallel_state.destroy_model_parallel()  # what a build that failed has left
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
    """Where this rank is, outermost dimension first."""
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
    """The size of every dimension, and the global rank at every place, as the ranks tell it; collective.

    And where experts are shared out or split, the same for these.
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
    """The mesh of those ``sizes`` on which every rank is ``here``; collective."""
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, tuple(here.values()))
    ranks = torch.full(tuple(sizes.values()), -1)
    for rank, place in enumerate(places):
        assert ranks[place] == -1, f"ranks {ranks[place]} and {rank} are both at {place}"
        ranks[place] = rank
    return {"dims": sizes, "ranks": ranks.tolist()}


def same_microbatch_group() -> dist.ProcessGroup:
    """The ranks of this pipeline stage that see other tokens of the same micro-batches."""
    return parallel_state.get_tensor_and_context_parallel_group()


def same_batch_group() -> dist.ProcessGroup:
    """The ranks of this pipeline stage that see other tokens of the same global batch."""
    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def from_last_stage(value: T | None, device: torch.device) -> T:
    """What the last stage of this rank's pipeline passes; the others pass None. Collective."""
    box = [value]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast_object_list(box, src=last, group=group, device=device)
    assert box[0] is not None
    return box[0]


def random_stream() -> int:
    """A number of its own for all ranks that draw different random numbers, which those of tp do not."""
    here, size = coordinates(), group_sizes()
    return (here["pp"] * size["dp"] + here["dp"]) * size["cp"] + here["cp"]
